"""Validation of the settings of `longstride reproduce`. Imported without torch."""

from longstride.commands.exits import is_only_process
from longstride.commands.reproduce.experiments import EXPERIMENTS
from longstride.commands.reproduce.settings import Reproduction
from longstride.common.atomic import check_output
from longstride.common.checks import finite_number, whole_number
from longstride.common.figures import picture_path
from longstride.common.files import check_run_folder, check_source
from longstride.model.saved_config import find_settings

TABLE_4 = "table4"
NOT_IN_TABLE_4 = ("rows", "seconds", "seeds", "split", "most_bytes", "run")


def check_settings(experiment: str, settings: Reproduction) -> None:
    """Raises ValueError for settings that cannot be run."""
    if not is_only_process():
        raise ValueError("reproduce: runs in one process; start it without torchrun")
    if settings.picture is not None:
        check_output("reproduce", "picture", picture_path("reproduce", settings.picture), settings.force)
    if settings.read is not None:
        if not settings.read.is_file():
            raise ValueError(f"reproduce: read = {str(settings.read)!r} is no file; give the JSON of an earlier call")
        return
    if settings.out is None:
        raise ValueError("reproduce: --out must be given: the folder for runs and results")
    check_run_folder("reproduce", settings.out)
    for name in ("steps", "most_bytes"):
        if getattr(settings, name) is not None:
            whole_number("reproduce", name, getattr(settings, name), 1)
    if settings.seconds is not None and finite_number("reproduce", "seconds", settings.seconds) <= 0:
        raise ValueError(f"reproduce: seconds must be more than 0, got {settings.seconds}")
    if settings.seconds is not None and settings.steps is not None:
        raise ValueError("reproduce: --steps and --seconds are both given; give one of them")
    if not settings.seeds or len(set(settings.seeds)) < len(settings.seeds):
        raise ValueError(f"reproduce: seeds must be one or more different ones, got {settings.seeds}")
    for seed in settings.seeds:
        whole_number("reproduce", "seeds", seed, 0)
    for path in settings.data:
        check_source(path)
    if settings.run is not None:
        find_settings("reproduce: run", settings.run)
    if experiment == TABLE_4:
        for name in NOT_IN_TABLE_4:
            if getattr(settings, name) != getattr(Reproduction(), name):
                raise ValueError(
                    f"reproduce: table4 has no --{name.replace('_', '-')}; it trains a few steps at each context"
                )
        return
    EXPERIMENTS[experiment].select(settings.rows)
    if settings.run is not None and experiment != "table3":
        raise ValueError(f"reproduce: --run is for table3, which scores a network; {experiment} trains its own")
