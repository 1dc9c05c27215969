"""longstride plan, and longstride train --gpu-memory"""

import json
import shlex
from contextlib import nullcontext

import numpy as np
import pytest

from longstride.commands.main import main
from longstride.data.store import write_store

LONG = "music-65536 --gpu-memory 16GB --context 1048576 --host-memory 100GiB"


def said(capsys, words):
    main(["plan", *shlex.split(words)])
    return capsys.readouterr().out


def test_a_million_bytes_in_16_gigabytes(capsys):
    text = said(capsys, LONG)
    assert "153.8 million parameters, context 1,048,576" in text
    assert "GPU 16.0 GB (14.9 GiB), host 100.0 GiB" in text
    command = shlex.split(text.splitlines()[-1])
    assert command[:3] == ["longstride", "train", "music-65536"]
    assert command[command.index("--model.context") + 1] == "1048576"
    assert "host" in command[command.index("--model.recompute") + 1]


def test_ways_to_divide_the_batch(capsys):
    rows = [line.split() for line in said(capsys, "enwik8 --gpu-memory 16GB").splitlines()]
    divided = [(row[0], row[1]) for row in rows if len(row) > 5 and row[0].isdigit()]
    assert divided == [("8", "1"), ("4", "2"), ("2", "4"), ("1", "8")]


def test_the_table_breaks_no_word(capsys):
    words = said(capsys, "enwik8 --gpu-memory 16GB").split()
    assert "27*selective" in words
    assert "19*selective" in words


def test_the_nearest_that_fits(capsys):
    text = said(capsys, LONG.replace("100GiB", "2GiB"))
    assert "Nothing fits: one sequence at a time takes 10.6 GiB of the GPU, beside 6% that stay free, and, with the" in text
    assert "inputs of all blocks, 48.0 GiB of the host." in text
    assert "The nearest that fits has a context of 524,288:" in text
    assert "--model.context 524288" in text


def test_a_network_that_does_not_fit_at_any_length_is_an_error(capsys):
    with pytest.raises(SystemExit) as ended:
        said(capsys, "cifar10 --gpu-memory 1GB")
    assert ended.value.code == 2
    printed = capsys.readouterr()
    assert "Nothing fits: one sequence at a time takes" in printed.out
    assert "plan: gpu_memory = '1GB' is too small for cifar10, with shorter contexts, too: use a smaller" in printed.err


@pytest.mark.parametrize("memory", ["24GiB", "16GB"])
def test_the_command_has_the_memory_as_it_was_given(memory, capsys):
    assert f"--gpu-memory {memory} " in said(capsys, f"enwik8 --gpu-memory {memory}").splitlines()[-1]


def test_what_does_not_fit_is_not_said_to_take_less_than_there_is(capsys):
    with pytest.raises(SystemExit):
        said(capsys, "text-modern --gpu-memory 2GiB --host-memory 20GiB")
    text = capsys.readouterr().out
    assert "one sequence at a time takes 1.9 GiB of the GPU, beside 6% that stay free, and" in text


@pytest.mark.parametrize(("memory", "parts"), [("6GiB", "2"), ("60GB", "1"), ("4GB", None)])
def test_the_chosen_row_is_what_training_does(memory, parts, capsys):
    """It need not have the least time: a little less is no reason for more parts."""
    text = said(capsys, f"enwik8 --gpu-memory {memory}")
    (chosen,) = [line.split() for line in text.splitlines() if line.rstrip().endswith("chosen")]
    command = shlex.split(text.splitlines()[-1])
    trained = command[command.index("--accumulate") + 1] if "--accumulate" in command else "1"
    assert chosen[1] == trained
    assert parts in (None, trained)
    assert f"Chosen: {chosen[0]} at a time." in text
    assert "The fastest" not in text


def test_recomputation_that_does_not_fit_is_replaced_before_the_context(capsys):
    text = said(capsys, "enwik8 --gpu-memory 4GB --recompute off")
    assert "With recompute off nothing fits, with one sequence at a time, either. With auto this does:" in text
    assert "Nothing fits" not in text
    command = text.splitlines()[-1]
    assert "--model.context" not in command
    assert "--model.recompute" in command
    assert "The nearest that fits" in said(capsys, f"{LONG.replace('100GiB', '2GiB')} --recompute off")


@pytest.mark.parametrize("recompute", ["on", "off"])
def test_the_command_names_the_recomputation_also_if_it_is_that_of_the_preset(recompute, capsys):
    command = shlex.split(said(capsys, f"enwik8 --gpu-memory 80GB --recompute {recompute}").splitlines()[-1])
    assert command[command.index("--model.recompute") + 1] == recompute


def test_the_most_sequences_are_those_of_the_recomputation_that_was_given(capsys):
    text = said(capsys, "enwik8 --gpu-memory 16GB --recompute on")
    assert text.split("Most sequences at a time: ")[1].split("\n")[0].endswith(", with recompute on.")


def test_settings_that_are_given(capsys):
    text = said(capsys, "enwik8 --gpu-memory 80GB --batch 3 --recompute '10*off + 20*on' --optimizer muon")
    assert "10*off + 20*on" in text
    assert "batch 3, muon" in text


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("enwik9 --gpu-memory 16GB", "plan: there is no preset 'enwik9'; did you mean 'enwik8'?"),
        ("enwik8 --gpu-memory 16", "plan: gpu_memory must be a size such as 16GB or 80GiB, got '16'"),
        ("enwik8 --gpu-memory 16GB --recompute never", "recompute must be one of off, selective, on, parts, host, auto"),
        (
            "cifar10 --gpu-memory 16GB --context 4096",
            "longstride: plan: embedding 'image(32, 32, 3)' has 3,072 bytes and context is 4,096",
        ),
    ],
)
def test_bad_input(words, message, capsys):
    with pytest.raises(SystemExit) as ended:
        said(capsys, words)
    assert ended.value.code == 2
    assert message in capsys.readouterr().err


@pytest.fixture
def train(tmp_path):
    """The words of a short run of two blocks."""
    stream = np.random.default_rng(0).integers(0, 256, 5000, dtype=np.uint8)
    write_store(tmp_path / "data", "text", {"train": stream, "valid": stream})
    words = f"train text-small --data {tmp_path}/data --out {tmp_path}/run --batch 1 --validate-bytes 1 --model.layers 2"
    return words.split()


def saved(tmp_path):
    return json.loads((tmp_path / "run" / "config.json").read_text())


def test_train_with_a_memory_chooses_and_records(train, capsys, tmp_path):
    main([*train, "--steps", "1", "--gpu-memory", "16GB"])
    assert "recompute off: predicted peak" in capsys.readouterr().err
    assert (saved(tmp_path)["model"]["recompute"], saved(tmp_path)["gpu_memory"]) == ("off", "16GB")
    main([*train, "--steps", "2", "--resume", "--gpu-memory", "2GB"])
    assert saved(tmp_path)["model"]["recompute"] == "off"


def test_recomputation_that_is_given_with_a_memory_stays(train, tmp_path):
    main([*train, "--steps", "1", "--gpu-memory=16GB", "--model.recompute", "parts + host"])
    assert saved(tmp_path)["model"]["recompute"] == "parts + host"


def test_a_command_that_torchrun_starts_anew_goes_on_with_its_plan(train, tmp_path, monkeypatch):
    """Also in one process, whose folder is looked at before torch is imported."""
    from longstride.training import loop
    from longstride.training.ranks import Ranks

    words = [*train, "--steps", "2", "--batch", "4", "--model.context", "512", "--gpu-memory", "1075MB"]
    words += ["--model.precision", "float32"]
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "one")
    main([*words, "--until", "1"])
    planned = saved(tmp_path)["accumulate"]
    assert planned > 1
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    monkeypatch.setattr(loop, "join_process_group", lambda device: nullcontext(Ranks(restarted=True)))
    main(words)
    assert saved(tmp_path)["accumulate"] == planned
    assert (tmp_path / "run/checkpoints/step-2").exists()
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "two")
    with pytest.raises(SystemExit):
        main(words)
