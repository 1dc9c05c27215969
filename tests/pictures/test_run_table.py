import json

import pytest

from longstride.common.files import file_sha256
from longstride.pictures.run_table import read_scores


def score(folder, split, rows, digest=None):
    (folder / "model.safetensors").write_bytes(b"weights")
    given = {"weights_sha256": digest or file_sha256(folder / "model.safetensors"), "rows": rows}
    (folder / f"eval-{split}.json").write_text(json.dumps(given))


def test_scores_of_the_runs_weights(tmp_path):
    assert read_scores(tmp_path) == {}
    score(tmp_path, "test", [{"min_context": 64, "bits_per_byte": 1.5}, {"min_context": 0, "bits_per_byte": 1.60391}])
    score(tmp_path, "valid", [{"min_context": 0, "bits_per_byte": 2}])
    score(tmp_path, "test-first-1000", [{"min_context": 0, "bits_per_byte": 3}])
    assert read_scores(tmp_path) == {
        "eval valid": "2.0000 with min context 0",
        "eval test": "1.6039 with min context 0, 1.5000 with 64",
    }


def test_scores_of_other_weights_are_left_out(tmp_path):
    score(tmp_path, "test", [{"min_context": 0, "bits_per_byte": 2}], digest="0" * 64)
    assert read_scores(tmp_path) == {}


@pytest.mark.parametrize("rows", [None, 3, [3], [{}], [{"min_context": 0, "bits_per_byte": 10**400}]])
def test_damaged_scores_are_named(rows, tmp_path):
    score(tmp_path, "test", rows)
    with pytest.raises(ValueError, match=r"plot run: .*eval-test\.json is damaged: .*; remove it"):
        read_scores(tmp_path)
