"""Small models with all that is saved of them, and checkpoints of them."""

import torch

from longstride.model import SparseTransformer
from longstride.training import OptimizerConfig
from longstride.training.checkpoint import Checkpoints
from longstride.training.optimizer import make_optimizers
from longstride.training.ranks import Ranks
from tests.training.small import MODEL


def made(name="adamw", seed=0, steps=0, model=MODEL):
    """What `save` and `load` are given: a model, its optimizers and an average."""
    torch.manual_seed(seed)
    model = SparseTransformer(model)
    optimizers = make_optimizers(model, OptimizerConfig(name, learning_rate=0.01))
    average = {name: torch.randn_like(x) for name, x in model.named_parameters()}
    walk(model, optimizers, average, steps)
    return model, optimizers, average


def walk(model, optimizers, average, steps):
    for _ in range(steps):
        for x in model.parameters():
            x.grad = torch.randn_like(x)
        for one in optimizers:
            one.step()
        for x in average.values():
            x.mul_(0.9)


def keeper(folder, keep=9):
    return Checkpoints(folder, keep, Ranks(), torch.device("cpu"))


def save(folder, *steps, given=None, keep=9, best=None, **progress):
    """Checkpoints of these steps, whole. The last one's folder."""
    checkpoints = keeper(folder, keep)
    for step in steps:
        checkpoints.save(step, *(given or made(steps=1)), progress, best)
        checkpoints.wait()
    return folder / f"step-{steps[-1]}"


def part(folder):
    """The file of a checkpoint's state, of one process."""
    (path,) = (folder / "state").iterdir()
    return path


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def bits(model, optimizers, average):
    """Every tensor, copied, by where it is."""
    found = {f"model {name}": x for name, x in model.state_dict().items()}
    found |= {f"average {name}": x for name, x in average.items()}
    for number, one in enumerate(optimizers):
        for index, fields in one.state_dict()["state"].items():
            found |= {f"optimizer {number} {index} {key}": x for key, x in fields.items()}
    return {name: torch.as_tensor(x).clone() for name, x in found.items()}


def equal(one, two):
    assert one.keys() == two.keys()
    assert all(x.dtype == two[name].dtype for name, x in one.items())
    return all(torch.equal(x, two[name]) for name, x in one.items())
