import io
import json
from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from longstride.commands.doctor import sampling_report, show_sampling
from longstride.model.presets import preset
from longstride.model.saved_config import find_config
from tests.model import small


def shown(name, config):
    console = Console(file=io.StringIO(), width=100)
    show_sampling(name, config, console)
    return console.file.getvalue()


def test_says_what_sampling_from_a_preset_costs(monkeypatch):
    monkeypatch.setattr("longstride.commands.doctor.choose_device", lambda owner, name: torch.device("cpu"))
    found = dict(sampling_report("enwik8", preset("enwik8")))
    assert (
        found["sampling"]
        == "enwik8: 94,949,888 parameters, 182 MiB of weights in bfloat16, 362 MiB in float32, which a CPU uses"
    )
    assert found["1 stream"] == found["64 streams"] == "pytorch: on a CPU"
    # 30 blocks of 128 + 12,288 / 128 * 32 slots, each 512 numbers in float32 and 512 in bfloat16.
    assert found["cache"] == "281 MiB a stream, 26.0% of the 1,080 MiB that dense attention would keep"
    # 30 * 8 heads see a block of 128 and the 32 cells of each block, those of its own once.
    assert found["keys"] == "760,320 read for the last byte of 12,288, 25.8% of what dense would read"


def test_has_a_row_for_each_kind_of_pattern():
    text = shown("imagenet64", preset("imagenet64"))
    rows = [line.split() for line in text.splitlines()]
    assert ["Local(128)", "384", "ring", "of", "129", "129", "9.1", "MiB"] in rows
    assert ["Column(128)", "384", "all", "12,288", "96", "864", "MiB"] in rows
    assert "block of 128 + 3,072 cells" in shown("enwik8", preset("enwik8"))


def test_finds_runs_models_and_presets(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    small.model(width=32).save_pretrained("model")
    assert find_config("doctor", "model") == small.config(width=32)
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "config.json").write_text(json.dumps({"steps": 4, "model": asdict(small.config(heads=4))}))
    assert find_config("doctor", "run") == small.config(heads=4)
    (tmp_path / "enwik8").mkdir()  # Prepared data often has this name.
    assert find_config("doctor", "enwik8") == preset("enwik8")
    assert find_config("doctor", "enwik8-dense") == preset("enwik8-dense")
    small.model().save_pretrained("text-small")
    assert find_config("doctor", "text-small") == small.config()


def test_a_checkpoint_has_its_runs_config(tmp_path):
    small.model().save_pretrained(tmp_path)
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    assert find_config("doctor", str(tmp_path / "checkpoints" / "step-3")) == small.config()


def test_what_is_none_of_them_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"^doctor: there is no folder 'enwik9', and .*did you mean 'enwik8'"):
        find_config("doctor", "enwik9")
    with pytest.raises(ValueError, match=r"is no run and no saved model: it has no config\.json"):
        find_config("doctor", str(tmp_path))
    (tmp_path / "book.txt").touch()
    with pytest.raises(ValueError, match=r"^doctor: .*book\.txt is no run and no saved model: it is a file"):
        find_config("doctor", str(tmp_path / "book.txt"))
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json is not JSON"):
        find_config("doctor", str(tmp_path))
