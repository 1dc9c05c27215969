import json
import os

import pytest

from longstride.commands.main import main
from longstride.commands.runs import list_runs
from longstride.training import train_preset
from longstride.training.lock import Lock


def a_run(folder, rows=(), changed=1_000_000_000, **changes):
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(train_preset("text-small", steps=100, **changes).to_json())
    (folder / "run.json").write_text("{}")
    (folder / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name in ("config.json", "metrics.jsonl"):
        os.utime(folder / name, (changed, changed))
    return folder


def row(step, valid=None):
    return {"step": step, "loss": 1.0, "bits_per_byte": 1.4, "valid_bits_per_byte": valid}


def states(folder):
    return {run.folder.name: (run.state, run.step, run.best) for run in list_runs(folder)}


def test_states(tmp_path):
    a_run(tmp_path / "done", [row(50, 3.0), row(100, 2.5)])
    a_run(tmp_path / "stopped", [row(10), row(20, 4.0)])
    a_run(tmp_path / "patient", [row(10, 2.0), row(20, 4.0), row(30, 3.0)], patience=2)
    a_run(tmp_path / "new")
    a_run(tmp_path / "inside" / "another", [row(7)])
    a_run(tmp_path / "too/far/inside" / "another")
    (tmp_path / "empty").mkdir()
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    lock = Lock(a_run(tmp_path / "running", [row(30)]))
    assert states(tmp_path) == {
        "done": ("done", 100, 2.5),
        "stopped": ("stopped", 20, 4.0),
        "patient": ("done", 30, 2.0),
        "new": ("stopped", 0, None),
        "another": ("stopped", 7, None),
        "running": ("running", 30, None),
    }
    lock.release()
    assert states(tmp_path / "running") == {"running": ("stopped", 30, None)}


def test_an_extended_run_counts_validations_anew(tmp_path):
    """Its checkpoint has the number that a resume goes on from."""
    folder = a_run(tmp_path / "extended", [row(10, 2.0), row(20, 4.0), row(30, 3.0)], patience=2)
    for step, without_better in ((9, 2), (30, 1)):
        (folder / f"checkpoints/step-{step}").mkdir(parents=True)
        (folder / f"checkpoints/step-{step}/state.json").write_text(json.dumps({"without_better": without_better}))
    (folder / "checkpoints/step-40").mkdir()  # Unfinished.
    assert states(tmp_path) == {"extended": ("stopped", 30, 2.0)}
    (folder / "checkpoints/step-30/state.json").write_text("{}")
    (run,) = list_runs(tmp_path)
    assert (run.state, "without_better must be a whole number" in run.problem) == ("damaged", True)


def test_a_checkpoint_may_be_later_than_the_last_logged_step(tmp_path):
    folder = a_run(tmp_path / "interrupted", [row(10)])
    (folder / "checkpoints/step-17").mkdir(parents=True)
    (folder / "checkpoints/step-17/state.json").write_text('{"without_better": 0}')
    assert states(tmp_path) == {"interrupted": ("stopped", 17, None)}


def test_hostile_folders(tmp_path, capsys):
    """None stops the list, is waited for, or is followed."""
    fine = a_run(tmp_path / "runs/fine", [row(5, 1.5)])
    (a_run(tmp_path / "runs/config") / "config.json").write_text("{")
    (a_run(tmp_path / "runs/list") / "config.json").write_text("[]")
    lost = a_run(tmp_path / "runs/lost")
    (lost / "config.json").unlink()
    (lost / "checkpoints").mkdir()
    (a_run(tmp_path / "runs/metrics") / "metrics.jsonl").write_text('{"step": "x"}\n')
    fifo = a_run(tmp_path / "runs/fifo") / "metrics.jsonl"
    fifo.unlink()
    os.mkfifo(fifo)
    locked = a_run(tmp_path / "runs/lock")
    (locked / ".lock").symlink_to("/dev/zero")
    device = a_run(tmp_path / "runs/device") / "metrics.jsonl"
    device.unlink()
    device.symlink_to("/dev/zero")
    a_run(tmp_path / "runs/\x1b[2J")
    a_run(tmp_path / "elsewhere")
    (tmp_path / "runs/link").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "runs/loop").symlink_to(tmp_path / "runs")
    a_run(tmp_path / "runs/old", changed=-5)
    found = states(tmp_path / "runs")
    assert {name for name, state in found.items() if state[0] == "damaged"} == {
        "config",
        "list",
        "lost",
        "metrics",
        "fifo",
        "lock",
        "device",
    }
    assert "old" in found
    assert found["fine"] == ("stopped", 5, 1.5)
    assert not {"link", "loop", "elsewhere"} & found.keys()
    before = {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    main(["runs", str(tmp_path / "runs")])
    out = capsys.readouterr().out
    assert "config.json is missing" in out
    assert "\x1b" not in out
    assert len(out.splitlines()) == 1 + len(found)
    assert before == {path: path.lstat().st_mtime_ns for path in tmp_path.rglob("*")}
    assert fine.is_dir()


def test_the_newest_comes_first(tmp_path, capsys):
    for name, changed in (("b", 2_000_000_000), ("a", 1_000_000_000), ("c", 1_500_000_000)):
        a_run(tmp_path / name, [row(1_0, 2.0)], changed=changed)
    main(["runs", str(tmp_path)])
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:]] == [str(tmp_path / name) for name in "bca"]
    assert lines[1].split()[1:4] == ["10/100", "2.0000", "stopped"]


def test_none(tmp_path, capsys):
    main(["runs", str(tmp_path)])
    assert capsys.readouterr().out == f"{tmp_path} has no runs; longstride train makes one\n"
    with pytest.raises(SystemExit) as end:
        main(["runs", str(tmp_path / "nowhere")])
    assert end.value.code == 2
    assert capsys.readouterr().err == (
        f"longstride: runs: {tmp_path / 'nowhere'} is no folder; give the folder that has the runs\n"
    )
