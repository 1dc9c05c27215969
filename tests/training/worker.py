"""What the processes of tests/training/ranks.py do. A test may do it too: then it is a process alone."""

import hashlib
import os
import resource
import signal
import sys
import threading
import weakref
from collections import Counter
from contextlib import ExitStack, closing, nullcontext
from math import inf
from pathlib import Path
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from longstride.commands.main import main
from longstride.model import SparseTransformer
from longstride.training import averaging, distributed, interrupts, muon, train
from longstride.training import checkpoint_files as state_files
from longstride.training.checkpoint_files import Writer
from longstride.training.distributed import full_tensor
from longstride.training.muon import BatchedMuon
from longstride.training.precision import Updates
from longstride.training.ranks import REPORTED, join_process_group
from longstride.training.trainer import Trainer
from tests.training.small import config
from tests.training.stand_in_graph import stand_in_graphs

SHAKEN = 3
"""The step before which something happens."""
SHORT = {"steps": 8, "save_every": 2}
CHANGES = {"os.rename": (0, 1), "os.remove": (0,), "os.rmdir": (0,), "shutil.rmtree": (0,)}
"""Which arguments of these events are paths."""


def plan(folder, name="run", model=None, **changes):
    """A config without dropout, which is another one on each rank, that logs every step."""
    given = {"data": str(folder / "data"), "steps": 20, "log_every": 1, "device": "cpu"}
    return config(folder / name, **{**given, **changes, "model": {"dropout": 0.0, **(model or {})}})


def trained(folder, plans, resume=False, until=None):
    """Runs one after the other, each in a group of its own; how each ended."""
    ends = [train(plan(folder, **one), resume, until) for one in plans]
    return [[end.step, end.reason, end.best_bits_per_byte, end.best_step] for end in ends]


def captured(folder, plans, resume=False, until=None):
    """As `trained`, with graphs that stand in for CUDA's, and gradients in buckets of 4 KiB. Also the replays of each graph,
    and how often gradients were averaged after a backward pass."""
    counting = patch.object(distributed, "average_gradients", wraps=averaging.average_gradients)
    with patch.object(averaging, "BUCKET_BYTES", 4096), stand_in_graphs() as graphs, counting as averaged:
        ends = trained(folder, plans, resume, until)
    return ends, [len(replays) for replays in graphs], averaged.call_count


def shared_weights():
    """Of a model that each process has drawn other weights for, the weights with which captured steps begin."""
    with join_process_group("cpu") as ranks:
        torch.manual_seed(ranks.rank)
        made = SparseTransformer(plan(Path()).model)
        before = made.blocks[0].ff.inner.weight.tolist()
        distributed.ParallelModel(made, torch.device("cpu"), ranks, "ddp", torch.float32, captured=True)
    return before, [x.tolist() for x in made.parameters()]


def trained_in_float32(folder, plans):
    """Muon computes in bfloat16, where whatever is added in another order differs visibly."""
    with patch.object(torch.Tensor, "bfloat16", torch.Tensor.float):
        return trained(folder, plans)


def shared_muon():
    """Three steps of Muon in stacks: the weights, and how many matrices this process orthogonalized."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.nn.Parameter(torch.randn(shape, generator=generator)) for shape in 5 * [(8, 24)] + [(16, 16)]]
    counted, orthogonalize = [], muon.orthogonalize

    def counting(stack, *iteration):
        counted.append(len(stack))
        return orthogonalize(stack, *iteration)

    with join_process_group("cpu") as ranks, patch.object(muon, "orthogonalize", counting):
        optimizer = BatchedMuon(weights, lr=0.02)
        optimizer.ranks = ranks
        for _ in range(3):
            for x in weights:
                x.grad = torch.randn(x.shape, generator=generator)
            optimizer.step_in_stacks()
    return [[x.tolist() for x in weights], counted]


def step(trainer):
    ranks, made = trainer.ranks, trainer.config
    tokens = trainer.training.batch(made.seed, trainer.step, made.batch, ranks.rank, ranks.count)
    trainer.take_step(torch.from_numpy(tokens))
    return trainer.finish_steps()


def state(trainer):
    """All that the next step depends on, whole: of each tensor a digest."""
    names = {x: name for name, x in trainer.model.named_parameters()}
    found = {f"model {name}": x for name, x in trainer.model.state_dict().items()}
    found |= {f"average {name}": x for name, x in trainer.average.items()}
    for optimizer in trainer.optimizers:
        for x, fields in optimizer.state.items():
            found |= {f"{name} {names[x]}": value for name, value in fields.items()}
    return {name: hashlib.sha256(full_tensor(x).detach().numpy().tobytes()).hexdigest() for name, x in found.items()}


def saved(folder, plans, steps):
    """Of each the state after so many steps, as it is saved."""
    found = []
    with join_process_group("cpu") as ranks:
        for one in plans:
            with closing(Trainer(plan(folder, **one), False, ranks)) as trainer:
                for _ in range(steps):
                    step(trainer)
                trainer.run_state.losses = []
                trainer.save()
                trainer.checkpoints.wait()
                found.append(state(trainer))
    return found


def loaded(folder, plans, until):
    """Of each the state that it is resumed with. Then it goes on."""
    found = []
    with join_process_group("cpu") as ranks:
        for one in plans:
            with closing(Trainer(plan(folder, **one), True, ranks)) as trainer:
                found.append(state(trainer))
            train(plan(folder, **one), True, until)
    return found


def refused(folder, plans):
    """What is wrong with each."""
    found = []
    with join_process_group("cpu"):
        for one in plans:
            try:
                train(plan(folder, **one))
            except ValueError as error:
                found.append(str(error))
    return found


def overflowed(folder, plans, shard):
    """Of each, for every step whether it was skipped, the scale then, and the state. At one, rank 1 alone has an overflow:
    in its loss, or in its shard of a single weight."""
    loss, update, found = SparseTransformer.loss, Updates.update, []
    with join_process_group("cpu") as ranks:

        def shaken():
            return len(found[-1]) == SHAKEN and ranks.rank == 1

        def infinite_loss(model, tokens):
            return loss(model, tokens) * (inf if shaken() and not shard else 1)

        def infinite_shard(updates, loss):
            if shaken() and shard:
                updates.model.blocks[0].ff.inner.weight.grad.to_local()[0, 0] = inf
            return update(updates, loss)

        with patch.object(SparseTransformer, "loss", infinite_loss), patch.object(Updates, "update", infinite_shard):
            for one in plans:
                found.append([])
                with closing(Trainer(plan(folder, **one, model={"precision": "float16"}), False, ranks)) as trainer:
                    trainer.updates.loss_scale.growth_interval = 2
                    while len(found[-1]) < SHAKEN + 3:
                        skipped = step(trainer)["skipped"]
                        found[-1].append((skipped, trainer.updates.scale, state(trainer)))
    return found


def ended(folder, changes, count):
    """So many groups one after the other. Each ends while a trainer that has averaged gradients in it is still there, and
    goes right after it."""

    def one(number):
        with (
            join_process_group("cpu") as ranks,
            closing(Trainer(plan(folder, f"{number}", **changes), False, ranks)) as trainer,
        ):
            step(trainer)

    for number in range(count):
        one(number)
    return count


class Counted(TorchDispatchMode):
    """How often the processes communicate while it lasts, by how."""

    def __init__(self):
        super().__init__()
        self.found = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        if function.namespace == "c10d":
            self.found[function.__name__.partition(".")[0]] += 1
        return function(*args, **(kwargs or {}))


def third_step(folder, plans, watch):
    """Of each what `watch`, a context made for so many ranks, sees of the third step. The first ones do other things too."""
    found = []
    with join_process_group("cpu") as ranks:
        for one in plans:
            with closing(Trainer(plan(folder, **one), False, ranks)) as trainer:
                step(trainer)
                step(trainer)
                with watch(ranks.count) as seen:
                    step(trainer)
                found.append(seen.found)
    return found


def counted(folder, plans):
    """Of each, how often a step communicates."""
    return third_step(folder, plans, lambda _: Counted())


def interrupted(folder, plans):
    """Rank 1 alone is asked to end."""
    take_step = Trainer.take_step

    def shaken(trainer, tokens):
        if trainer.step == SHAKEN and trainer.ranks.rank == 1:
            signal.raise_signal(signal.SIGTERM)
        return take_step(trainer, tokens)

    with patch.object(Trainer, "take_step", shaken):
        return trained(folder, plans)


def watched(folder, plans):
    """What this process changes in the folders of the runs."""
    changed = set()

    def note(event, given):
        writes = event == "open" and isinstance(given[2], int) and given[2] & (os.O_WRONLY | os.O_RDWR)
        for path in (given[0],) if writes else [given[place] for place in CHANGES.get(event, ())]:
            path = Path(os.fsdecode(path)) if isinstance(path, str | bytes | Path) else Path()
            if path.is_relative_to(folder):
                changed.add(str(path.relative_to(folder)))

    sys.addaudithook(note)
    trained(folder, plans)
    return sorted(changed)


def killed_once(work):
    """As torchrun starts it: the last rank is killed in the first attempt."""
    take_step, is_last = Trainer.take_step, int(os.environ["RANK"]) == int(os.environ["WORLD_SIZE"]) - 1

    def fatal(trainer, tokens):
        if trainer.step == SHAKEN and is_last and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            os.kill(os.getpid(), signal.SIGKILL)
        return take_step(trainer, tokens)

    with patch.object(Trainer, "take_step", fatal):
        work()


FAILURES = [
    ({0}, ValueError("bad data")),
    ({0}, OSError(28, "No space left on device")),
    ({0, 1}, KeyError("x")),
    ({1, 2}, ValueError("bad data")),
    ({2}, FloatingPointError("not finite: \N{SNOWMAN}")),
    (set(), None),
]
"""Which ranks fail, and how."""


def disagreed():
    """Of each what this process raises, and whether it need not show it."""
    found = []
    with join_process_group("cpu") as ranks:
        for who, error in FAILURES:

            def work(who=who, error=error):
                if ranks.rank in who:
                    raise error
                return f"done by {ranks.rank} of {ranks.count}"

            try:
                found.append(["none", ranks.run_on_all(work), False])
            except Exception as caught:
                found.append([type(caught).__name__, str(caught), REPORTED in caught.__notes__ if ranks.rank else False])
    return found


def sparing(folder, changes):
    """Of a run and of what resumes it: how often a whole model is moved, the bytes of all weights and of the largest that is
    loaded, and how many whole ones are still there when another is put together."""
    made, loaded, there, moved = [], [], [], []
    whole_one, fill = distributed.full_tensor, state_files.copy_weight

    def watched_whole(x):
        there.append(sum(one() is not None for one in made))
        found = whole_one(x)
        made.append(weakref.ref(found))
        return found

    def watched_fill(x, source, name):
        loaded.append(source.nbytes)
        fill(x, source, name)

    with ExitStack() as stack:
        stack.enter_context(patch.object(distributed, "full_tensor", watched_whole))
        stack.enter_context(patch.object(state_files, "copy_weight", watched_fill))
        stack.enter_context(patch.object(SparseTransformer, "to", lambda *given: moved.append(given)))
        trained(folder, [changes], until=2)
        trained(folder, [changes], resume=True)
    return {"whole": max(there), "weights": sum(loaded), "loaded": max(loaded), "moved": len(moved)}


def commanded(words):
    main(words)


def failing(words, place, ranks, error):
    """The command, with one place that fails on these ranks."""
    with patch(place, side_effect=error) if int(os.environ["RANK"]) in ranks else nullcontext():
        main(words)


def limited(words, limit, ranks):
    """The command, where these ranks can write no larger file."""
    if int(os.environ.get("RANK", "0")) in ranks:
        resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    main(words)


def stopped_twice(words, ranks):
    """The command, which these ranks are asked to end: once, and again while they write what that has led to."""
    rank, take_step = int(os.environ["RANK"]), Trainer.take_step

    def ask():
        if rank in ranks:
            signal.pthread_kill(threading.main_thread().ident, signal.SIGTERM)

    def shaken(trainer, tokens):
        if trainer.step == SHAKEN:
            ask()
        return take_step(trainer, tokens)

    def endless(*given):
        ask()
        threading.Event().wait()

    with ExitStack() as stack:
        stack.enter_context(patch.object(interrupts, "SAME_REQUEST", -1.0))
        stack.enter_context(patch.object(Trainer, "take_step", shaken))
        if rank in ranks:
            stack.enter_context(patch.object(Writer, "write_data", endless))
        main(words)


if __name__ == "__main__":
    torch.set_num_threads(1)
    folder, *words = sys.argv[1:]
    killed_once(lambda: main(words) if words else trained(Path(folder), [SHORT]))
