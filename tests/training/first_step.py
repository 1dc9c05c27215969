"""Takes the first step of a run as on a Hopper GPU, without one: kernels are compiled for it, and launches are only counted.

python -m tests.training.first_step FOLDER [--one-by-one]

Prints, as JSON, which kernels were compiled before the step and which in it, by how many threads, and which were launched.
"""

import json
import os
import sys
import threading
from pathlib import Path

os.environ["TRITON_INTERPRET"] = "0"
if len(sys.argv) > 1:
    os.environ["TRITON_CACHE_DIR"] = str(Path(sys.argv[1], "triton"))

import torch
import triton
from triton.backends.compiler import GPUTarget

from longstride.attention import api
from longstride.attention.kernels import call, ops, views
from longstride.attention.kernels.hopper import choice, launch
from longstride.model import product_kernels, product_ops, residual, residual_kernels, residual_ops
from longstride.training.first_step import compile_kernels
from longstride.training.trainer import Trainer
from tests.training.small import config, store

MODEL = {
    "width": 128, "heads": 2, "context": 128, "pattern": "merged(fixed(32, 8))", "embedding": "matrix(32)", "dropout": 0.0,
    "precision": "bfloat16",
}  # fmt: skip
PROCESSORS = 132


class Utilities:
    """Stands for Triton's access to the CUDA driver."""

    def get_device_properties(self, device):
        return {"max_shared_mem": 232_448}

    def load_binary(self, name, kernel, shared, device):
        loaded.append(name)
        return 1, 1, 0, 0, 1024

    def launch(self, *arguments):
        raise AssertionError("a launch that is not counted")


class Driver:
    """Stands for a machine with a Hopper GPU."""

    utils = Utilities()

    def get_current_target(self):
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self):
        return 0

    def get_current_stream(self, device):
        return 0

    def launcher_cls(self, source, metadata):
        def count(*arguments):
            launched.append(source.name)

        return count


compiled: list[tuple[str, str]] = []
"""Kernels, and the threads that compiled them."""
loaded: list[str] = []
launched: list[str] = []


def as_on_hopper():
    triton.runtime.driver.set_active(Driver())
    call.BACKENDS = tuple((name, lambda device: True) for name, _ in call.BACKENDS)
    api.implementation_name = lambda *_: "triton"
    ops.check = lambda q, k, v: None  # On a CPU it refuses bfloat16.
    views.LEAST_ROWS = 0
    choice.is_hopper = lambda device: True
    for module in (launch, product_kernels):
        module.processors = lambda device: PROCESSORS
    residual.is_fused = lambda x: torch.is_grad_enabled()
    residual_ops._run_kernels = lambda x, whole_rows=True: residual_kernels.takes(x, whole_rows)
    product_ops.takes = lambda device, dtype, width, inner: width in product_ops.WIDTHS and inner % product_ops.INNER == 0


def count_compilations():
    compile_kernel = triton.compiler.compile

    def counted(source, *arguments, **settings):
        compiled.append((source.name, threading.current_thread().name))
        return compile_kernel(source, *arguments, **settings)

    triton.compiler.compile = triton.compiler.compiler.compile = counted


def main(folder, one_by_one):
    as_on_hopper()
    count_compilations()
    made = config(folder, data=store(folder / "data"), model=MODEL)
    trainer = Trainer(made, resume=False, say=lambda line: None)
    tokens = torch.from_numpy(trainer.training.batch(0, 0, made.batch))
    before = {name: x.clone() for name, x in trainer.model.state_dict().items()}
    if not one_by_one:
        compile_kernels(trainer.model, lambda: trainer.updates.backward(trainer.parallel.loss(tokens)))
    answer = {
        "changed": [name for name, x in trainer.model.state_dict().items() if not torch.equal(x, before[name])],
        "gradients": [name for name, x in trainer.model.named_parameters() if x.grad is not None],
        "compiled before": sorted(name for name, _ in compiled),
        "loaded before": sorted(loaded),
        "launched before": list(launched),
        "threads": len({thread for _, thread in compiled}),
    }
    compiled.clear()
    trainer._compute(tokens)
    answer |= {"compiled in the step": sorted(name for name, _ in compiled), "launched": sorted(set(launched))}
    trainer.close()
    print(json.dumps(answer))


if __name__ == "__main__":
    main(Path(sys.argv[1]), "--one-by-one" in sys.argv)
