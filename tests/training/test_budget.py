import json
import re
from contextlib import closing, contextmanager
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from longstride.model.pinned import PinError
from longstride.training import train
from longstride.training.budget import (
    advice,
    available_memory,
    flags,
    memory_limit,
    resolve_recomputation,
    validation_batch,
    with_advice,
)
from longstride.training.plan import CONTEXT_BYTES, make_plan, predict
from longstride.training.ranks import SINGLE_RANK, Ranks
from tests.training.small import config, same, weights

AUTO = {"model": {"recompute": "auto"}}
CPU = torch.device("cpu")


def recompute_of(run):
    return json.loads((run / "config.json").read_text())["model"]["recompute"]


def test_the_choice_is_said(tmp_path):
    said = []
    chosen = resolve_recomputation(config(tmp_path, **AUTO, gpu_memory="16GB"), False, SINGLE_RANK, said.append)
    assert chosen.model.recompute == "off"
    assert "recompute off: predicted peak 0.1 GiB of 14.9" in said[0]


def test_a_run_with_auto_can_be_resumed_with_another_memory(tmp_path, monkeypatch):
    small = config(tmp_path, model={"recompute": "auto", "context": 64}, gpu_memory="16GB")
    monkeypatch.setattr("longstride.training.plan.CONTEXT_BYTES", 0)
    train(small, until=5)
    assert recompute_of(tmp_path / "run") == "off"
    little = config(tmp_path, data=small.data, **AUTO, gpu_memory="73MB")
    assert make_plan(little, 73 * 10**6, 2**30).config.model.recompute != "off"
    train(little, resume=True)
    assert recompute_of(tmp_path / "run") == "off"
    plain = config(tmp_path / "other", data=small.data)
    (tmp_path / "other").mkdir()
    train(plain)
    assert same(weights(tmp_path / "run"), weights(tmp_path / "other" / "run"))


def test_a_resumed_run_keeps_its_planned_accumulation(tmp_path):
    """So that dropout masks stay the same."""
    model = {"layers": 4, "context": 2048, "recompute": "auto"}
    given = config(tmp_path, batch=16, steps=3, model=model, gpu_memory="1060MB", validate_bytes=1, validate_every=100)

    def accumulate():
        return json.loads((tmp_path / "run" / "config.json").read_text())["accumulate"]

    train(given, until=1)
    planned = accumulate()
    assert planned > given.accumulate == 1
    train(given, resume=True, until=2)
    assert accumulate() == planned
    train(given, resume="auto")
    assert accumulate() == planned


@pytest.mark.parametrize(("processes", "accumulate"), [(1, 8), (2, 8), (4, 4), (8, 2), (3, 8)])
def test_accumulation_divides_the_sequences_of_other_numbers_of_processes(processes, accumulate, tmp_path):
    (tmp_path / "run").mkdir()
    given = config(tmp_path, batch=16, **AUTO)
    saved = config(tmp_path, data=given.data, batch=16, accumulate=8, model={"recompute": "on"})
    (tmp_path / "run" / "config.json").write_text(saved.to_json())
    chosen = resolve_recomputation(given, True, Ranks(count=processes), print)
    assert (chosen.model.recompute, chosen.accumulate) == ("on", accumulate)


def test_a_network_that_does_not_fit_is_refused(tmp_path):
    message = (
        r"train: gpu_memory = '1GB' is 0\.93 GiB, .* and recompute = 'host' takes .* GiB, beside 6% that stay free; "
        "(this fits|make the network smaller)"
    )
    with pytest.raises(ValueError, match=message):
        train(config(tmp_path, model={"recompute": "auto", "layers": 40, "width": 512, "heads": 8}, gpu_memory="1GB"))
    assert not (tmp_path / "run").exists()


def test_settings_that_do_not_fit_are_refused_with_some_that_do(tmp_path):
    given = config(tmp_path, model={"layers": 30, "context": 4096, "width": 64}, batch=64, gpu_memory="3GB")
    with pytest.raises(ValueError, match=r"recompute = 'off' takes .* GiB, .*; this fits: --model\.recompute '[^']+'"):
        train(given)
    assert train(config(tmp_path, data=given.data, steps=1, gpu_memory="3GB")).done


def test_out_of_memory_names_settings_that_fit(tmp_path, monkeypatch):
    from longstride.training.trainer import Trainer

    def fail(self, tokens):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")

    monkeypatch.setattr(Trainer, "take_step", fail)
    given = config(tmp_path, batch=64, model={"context": 512, "layers": 20}, gpu_memory="4GB")
    with pytest.raises(torch.OutOfMemoryError) as failed:
        train(given)
    assert failed.value.advice.startswith("These settings should fit, with another --out: --model.recompute '")
    with pytest.raises(torch.OutOfMemoryError) as failed, with_advice(config(tmp_path, gpu_memory="100MB"), CPU, 1):
        raise torch.OutOfMemoryError("CUDA out of memory.")
    assert failed.value.advice == "Use a smaller network."


def test_a_lack_of_memory_beside_pytorchs_tensors_names_settings_too(tmp_path, monkeypatch):
    given = config(tmp_path, batch=64, model={"context": 512, "layers": 20}, gpu_memory="4GB")
    with pytest.raises(RuntimeError) as failed, with_advice(given, CPU, 1):
        raise RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`")
    assert failed.value.advice.startswith("These settings should fit, with another --out: --model.recompute '")
    with pytest.raises(RuntimeError, match="a mistake") as failed, with_advice(given, CPU, 1):
        raise RuntimeError("a mistake")
    assert not hasattr(failed.value, "advice")

    def fail(*_):
        raise RuntimeError("CUDA error: unspecified launch failure")

    monkeypatch.setattr("longstride.training.budget.available_memory", fail)
    with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"), with_advice(given, CPU, 1):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")


def test_advice_for_a_run_with_a_checkpoint_can_be_followed(tmp_path, monkeypatch):
    """A run is resumed with the recomputation that it began with."""
    from longstride.training.trainer import Trainer

    take_step = Trainer.take_step

    def fail(self, tokens):
        if self.step == 6:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.")
        return take_step(self, tokens)

    given = config(tmp_path, batch=16, model={"recompute": "on"}, steps=8)
    with monkeypatch.context() as patch:
        patch.setattr(Trainer, "take_step", fail)
        patch.setattr("longstride.training.plan.CONTEXT_BYTES", 0)
        patch.setattr("longstride.training.budget.CONTEXT_BYTES", 0)
        patch.setattr("longstride.model.memory.WORKSPACE", 0)
        with pytest.raises(torch.OutOfMemoryError) as failed:
            train(given)
        one = replace(given, batch=1, model=replace(given.model, layers=20, context=4096, recompute="off"))
        newest = tmp_path / "run/checkpoints/step-5"
        new = advice(one, predict(one).peak, checkpoint=newest)
    found = re.fullmatch(r"This should fit: --resume --accumulate (\d+)\.", failed.value.advice)
    assert found
    assert train(replace(given, accumulate=int(found[1])), resume=True).done
    assert f"another --out, should fit: --init-from {newest} --model.recompute '" in new


def test_pinning_that_fails_names_settings_with_less_host_memory(tmp_path):
    given = config(tmp_path, batch=1, model={"layers": 4, "context": 2048, "recompute": "host"}, gpu_memory="4GB")
    with pytest.raises(PinError) as failed, with_advice(given, CPU, 1):
        raise PinError("2 GiB of host memory could not be pinned")
    assert "should fit, with another --out: --model.recompute 'off'" in failed.value.advice


def test_advice_takes_less_than_what_failed(tmp_path):
    model = {"context": 4096, "width": 64, "layers": 20}
    failed = config(tmp_path, batch=64, model=model)
    auto = config(tmp_path, data=failed.data, batch=64, model={**model, "recompute": "auto"})
    peak = predict(failed).peak
    said = advice(failed, peak + 2**30)
    plan = make_plan(auto, int(0.85 * (peak + CONTEXT_BYTES)))
    assert said == f"These settings should fit, with another --out: {flags(plan, failed)}."
    assert plan.memory.peak < peak


@pytest.mark.parametrize(("size", "rows"), [("", 4), ("16GB", 4), ("1GB", 1)])
def test_validation_takes_the_sequences_that_fit(size, rows, tmp_path, monkeypatch):
    from longstride.training import trainer

    seen = []
    monkeypatch.setattr(trainer, "validate", lambda model, sequences, starts, batch, ranks: seen.append(batch) or 1.0)
    given = config(tmp_path, gpu_memory=size)
    with closing(trainer.Trainer(given, False)) as made:
        made.validate()
    assert seen == [rows]


def test_a_validation_is_limited_by_the_whole_gpu(tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=10**9))
    assert validation_batch(config(tmp_path), torch.device("cuda")) == 1


def test_all_of_a_machine_is_the_default(tmp_path):
    given = config(tmp_path)
    assert available_memory(given, CPU) > 2**30
    assert available_memory(config(tmp_path, data=given.data, gpu_memory="2GiB"), CPU) == 2 * 2**30


@pytest.mark.parametrize("size", ["16", "GB", "0GB", "16 XB", "1e3GB", "-1GB", "16ib", 16])
def test_sizes_that_are_none(size, tmp_path):
    with pytest.raises(ValueError, match="gpu_memory must be a size such as 16GB or 80GiB, got "):
        config(tmp_path, gpu_memory=size)


@pytest.mark.parametrize(("name", "index"), [("cuda", 3), ("cuda:1", 1)])
def test_pytorch_is_limited_to_the_memory_of_a_device_by_index(name, index, monkeypatch, tmp_path):
    """PyTorch refuses a device without one."""
    limits = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=32 * 10**9))
    monkeypatch.setattr(torch.cuda, "set_per_process_memory_fraction", lambda share, device: limits.append((device, share)))
    with memory_limit(config(tmp_path, gpu_memory="16GB"), torch.device(name)):
        assert limits == [(index, pytest.approx(0.5 - CONTEXT_BYTES / 32e9))]
    assert limits[1:] == [(index, 1.0)]


def test_training_runs_within_the_limit(tmp_path, monkeypatch):
    from longstride.training import loop
    from longstride.training.trainer import Trainer

    limits, take_step, inside = [], Trainer.take_step, []

    @contextmanager
    def limit(config, device):
        limits.append((config.gpu_memory, device))
        yield
        limits.clear()

    monkeypatch.setattr(loop, "memory_limit", limit)
    monkeypatch.setattr(Trainer, "take_step", lambda self, tokens: inside.append(list(limits)) or take_step(self, tokens))
    train(config(tmp_path, steps=1, gpu_memory="4GB", device="cpu"))
    assert inside == [[("4GB", CPU)]]
