"""Tests of `longstride.transformers`: they are skipped where transformers is not installed."""

import importlib.util
import os

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TRANSFORMERS_VERBOSITY"] = "error"
os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
collect_ignore_glob = [] if importlib.util.find_spec("transformers") else ["test_*.py"]
