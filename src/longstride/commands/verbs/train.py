"""longstride train"""

import json
import os
import shlex
import tomllib
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Annotated, Any

import tyro
from tyro.constructors import PrimitiveConstructorSpec

from longstride.commands.ending import describe_ending, exit_if_interrupted
from longstride.commands.exits import is_main_process, is_only_process, is_restarted
from longstride.commands.parser import HELP, parse, whole_number_from
from longstride.common.checks import short_reason, short_repr
from longstride.common.files import check_source, parse_object, read_json, read_text
from longstride.model.card import SETTINGS
from longstride.model.presets import DENSE, PRESETS
from longstride.model.recipes import RecipeName
from longstride.model.recompute import AUTO
from longstride.model.saved_config import find_settings, read_content, settings_path
from longstride.model.shipped import NAMES
from longstride.training.config import Resume, TrainConfig, TypedConfig, fields_to_fit
from longstride.training.folder import RUN, check_free, check_holds_run
from longstride.training.presets import train_preset, with_recipe

ORDER = 60
TAKES_WORDS = True
LARGEST_TOML = 2**15
"""The most bytes of a TOML file: a key of n parts takes n * n memory."""
RESUME_NOT = "--resume=no"


def _read_resume(words: list[str]) -> bool | str:
    known: dict[str, bool | str] = {"": True, "auto": "auto", "no": False}
    if " ".join(words) not in known:
        raise ValueError(f"--resume stands alone, or before auto, got {' '.join(words)!r}")
    return known[" ".join(words)]


RESUME = PrimitiveConstructorSpec(
    nargs="*",
    metavar="[auto]",
    instance_from_str=_read_resume,
    is_instance=lambda value: value in (True, False, "auto"),
    str_from_instance=lambda value: ["auto"] if value == "auto" else [] if value else ["no"],
)
"""--resume, --resume auto, or --no-resume, which is turned into --resume=no."""
SHOWN = "text-small"
"""The preset whose defaults `longstride train --help` shows."""


def _hint(default: str) -> str:
    """The end of a flag's help."""
    return "(required)" if default in ("", "''") else f"(default: {default})"


@dataclass(frozen=True)
class Flags(TypedConfig):
    """The settings as flags. `data` and `out` have no default and are required."""

    data: Annotated[
        str,
        tyro.conf.arg(
            help="A prepared store, or a source: a text, an image or a sound file, or a folder of them.",
            help_behavior_hint=_hint,
        ),
    ] = ""
    out: Annotated[str, tyro.conf.arg(help="The run's folder.", help_behavior_hint=_hint)] = ""


def main(words: Sequence[str]) -> None:
    """Train a preset on data."""
    prog = f"longstride train {words[0]}" if words else ""
    if words and words[0] in HELP:
        prog, words = "longstride train PRESET", [SHOWN, *words]
    file = _value("--config", words)
    if file is not None and words[0].startswith("-"):
        prog, words = "longstride train", ["", *words]
    elif not words or words[0].startswith("-"):
        if any(word in HELP for word in words):
            return main(HELP[-1:])
        words = [_preset_of_run(words), *words]
        prog = f"longstride train {words[0]}".rstrip()
    _check_places(words)
    resumed = _resumed(words)
    start = resumed or (train_preset(words[0]) if words[0] else None)
    if file is not None:
        start = read_config(Path(file), start)
    assert start is not None
    if (recipe := _value("--recipe", words)) is not None:
        start = with_recipe(start, recipe)
    default = Flags.of(implied_auto(start, words) if resumed is None else start)
    fit = fields_to_fit(words) if resumed is None and file is None else []

    def run(config: Flags, resume: Resume, until: int | None) -> None:
        _train(words[0], config.checked(), resume, until, fit, file is not None)

    verb = make_verb(default, run)
    verb.__doc__ = (verb.__doc__ or "").replace(
        "PRESETS", f"{_presets()} The defaults below are those of {words[0] or file or 'the run'}."
    )
    typed = [RESUME_NOT if word == "--no-resume" else word for word in words[1:]]
    parse(verb, prog, typed, "train")()


def implied_auto(config: TrainConfig, words: Sequence[str]) -> TrainConfig:
    """Returns the config with recompute "auto" if the words have --gpu-memory, and do not say what to recompute."""
    given = {word.split("=")[0].replace("_", "-") for word in words}
    if "--gpu-memory" not in given or "--model.recompute" in given:
        return config
    return replace(config, model=replace(config.model, recompute=AUTO))


def make_verb(default: Flags, run: Callable[[Flags, Resume, int | None], None]) -> Callable[..., None]:
    """The function whose parameters are the flags after `longstride train PRESET`, with the preset's values as defaults."""

    def verb(
        config: Annotated[Flags, tyro.conf.arg(name="")] = default,
        resume: Annotated[Resume, RESUME] = False,
        until: int | None = None,
        settings: Annotated[Path | None, tyro.conf.arg(name="config")] = None,
        recipe: RecipeName | None = None,
    ) -> None:
        """Train a preset on data. Example: longstride train text-small --data enwik8.zip --out RUN --steps 1000

        PRESETS

        Every field of the preset can be changed: --model.layers 12 --optimizer.learning-rate 0.001. For images of another
        size than the preset's, context, embedding and stride follow from the data unless given.

        Args:
            resume: Continue the run in --out exactly where it stopped, with its own preset, data and settings. --resume auto
                also starts a run that does not exist, for batch systems that restart a job. --no-resume: start a new one.
            until: Pause after this step, as Ctrl-C does.
            settings: A TOML file, a run or its config.json, or an exported model or its name, whose values replace those of
                the preset; flags replace both. What has a whole model needs no preset. The file's out is not read.
            recipe: Fields of the network and an optimizer, together: "paper" as in the paper, or "modern", which learns
                faster. They replace those of the preset and of --config; flags for single fields replace them.
        """
        run(config, resume, until)

    return verb


def read_config(path: Path, start: TrainConfig | None) -> TrainConfig:
    """Reads settings from a TOML or JSON file, a run, or an exported model. `start` has the rest; without it the file must
    have a whole model."""
    if str(path) in NAMES or settings_path(path).is_file():
        found = find_settings("train: config", path)
        path = found.with_name(SETTINGS) if found.with_name(SETTINGS).is_file() else found
        given = read_content(path)
    elif not path.is_file():
        raise ValueError(f"train: config = {str(path)!r} is no file; give a TOML file or a run's config.json")
    else:
        given = _read_toml(path) if path.suffix == ".toml" else parse_object(read_text(path), str(path), finite=False)
    if start is None and "model" not in given:
        raise ValueError(f"train: {path} has no model; name a preset first: longstride train text-small --config {path}")
    merged = {} if start is None else asdict(start)
    for name, value in given.items():
        inner = name in ("model", "optimizer") and isinstance(value, dict) and name in merged
        merged[name] = {**merged[name], **value} if inner else value
    merged["out"] = "" if start is None else start.out
    return TrainConfig.from_json(json.dumps(merged, default=str), str(path))


def _read_toml(path: Path) -> dict[str, Any]:
    text = read_text(path, LARGEST_TOML)
    try:
        given = tomllib.loads(text, parse_float=_read_number)
        json.dumps(given, default=str)  # Not of a whole number with thousands of digits, or of deep lists.
        return given
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path} is not TOML of settings: {short_reason(error)}") from None


def _read_number(text: str) -> int | float:
    """Parses a number with a point or an exponent. 1e3 is a whole number, as on the command line."""
    try:
        return whole_number_from(text)
    except ValueError:
        return float(text)


def _presets() -> str:
    return f"The presets are {', '.join(PRESETS)}; with {DENSE} after its name a preset has full attention."


def _train(
    preset: str, config: TrainConfig, resume: Resume, until: int | None, fit: Sequence[str], has_file: bool
) -> None:  # fmt: skip
    """Trains, and prints how it ended. `has_file`: the model may be that of a file, not the preset's."""
    if resume is True and not config.data:  # A run has its data.
        check_holds_run(config.folder())
    config.check_paths()
    if resume is not True and is_only_process():
        check_source(config.data)
        if not resume and not is_restarted():  # Else `train` finds out whether this launch began the run.
            check_free(config.folder())
        if config.init_from:
            find_settings("train: init_from", Path(config.init_from).expanduser())

    from longstride.training import train as run

    summary = run(config, resume, until, fit=fit, preset="" if has_file else preset)
    if is_main_process():
        print("\n".join(describe_ending(preset or SHOWN, summary)))
    if not summary.done:
        exit_if_interrupted(summary)


def _check_places(words: Sequence[str]) -> None:
    """Refuses data in the place of the preset, or behind it without its flag."""
    if words[0].removesuffix(DENSE) not in ("", *PRESETS) and os.path.exists(words[0]):
        raise ValueError(
            f"train: {short_repr(words[0])} is no preset; if it is the data: longstride train text-small --data "
            f"{shlex.quote(words[0])} --out RUN; longstride presets lists the presets"
        )
    if words[1:] and not words[1].startswith("-"):
        raise ValueError(
            f"train: unexpected {short_repr(words[1])}; data comes after its flag: --data {shlex.quote(words[1])}"
        )


def _value(flag: str, words: Sequence[str]) -> str | None:
    """The value of a flag, before the other flags are parsed."""
    if flag in words[:-1]:
        return words[words.index(flag) + 1]
    return next((word.removeprefix(f"{flag}=") for word in words if word.startswith(f"{flag}=")), None)


def _preset_of_run(words: Sequence[str]) -> str:
    """The preset that the run to resume began with, for a command that names none; empty if the run began without one."""
    if _resumed(words) is None:
        raise ValueError("train: a preset comes first, as in: longstride train text-small --data FILE --out RUN")
    path = Path(_value("--out", words) or "") / RUN
    preset = read_json(path).get("preset") if path.is_file() else None
    return preset if isinstance(preset, str) and preset.removesuffix(DENSE) in PRESETS else ""


def _resumed(words: Sequence[str]) -> TrainConfig | None:
    """The settings of the run to resume, if there is one: flags given with --resume replace them."""
    folder = _value("--out", words)
    last = next((word for word in reversed(words) if word.split("=")[0] in ("--resume", "--no-resume")), "--no-resume")
    if last in ("--no-resume", RESUME_NOT) or folder is None:
        return None
    path = Path(folder) / "config.json"
    if not path.is_file():
        return None
    check_holds_run(Path(folder))
    return TrainConfig.read(path)
