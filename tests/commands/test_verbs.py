import sys
from importlib import import_module, invalidate_caches
from inspect import Parameter, signature
from typing import get_args, get_type_hints

import pytest

pytest.importorskip("tyro")

import tyro

from longstride.commands import verbs
from longstride.commands.completion import completion_script
from longstride.commands.main import main
from longstride.commands.verbs import find_verbs, in_order

GREET = '''"""longstride plot greeting"""

import tyro

ORDER = 115


def main(name: str = "World", times: int = 1) -> None:
    """Greet someone. Example: longstride plot greeting --name Ada

    Args:
        name: Who is greeted.
        times: How often.
    """
    print(f"Hello, {name}!" * times)
'''


@pytest.fixture
def new_verb(tmp_path, monkeypatch):
    """One more file beside those of the package."""
    (tmp_path / "plot_greeting.py").write_text(GREET)
    monkeypatch.setattr(verbs, "__path__", [*verbs.__path__, str(tmp_path)])
    invalidate_caches()
    yield "longstride.commands.verbs.plot_greeting"
    sys.modules.pop("longstride.commands.verbs.plot_greeting", None)


def test_a_file_is_a_verb(new_verb, capsys):
    main(["--help"])
    lines = capsys.readouterr().out.splitlines()
    places = {name: number for name in find_verbs() for number, line in enumerate(lines) if f"longstride {name} " in line}
    assert lines[places["plot greeting"]].split("  ")[-1].strip() == "Greet someone."
    assert places["plot attention"] < places["plot greeting"] < places["plot patterns"]
    assert new_verb not in sys.modules  # Its file was read, not run.
    main(["plot", "greeting", "--name", "Ada", "--times", "2"])
    assert capsys.readouterr().out == "Hello, Ada!Hello, Ada!\n"


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ("plot greting", "there is no verb 'plot greting'; did you mean 'plot greeting'?"),
        ("plot", "plot needs one of run, attention, greeting, patterns after it"),
        ("plot greeting --nmae Ada", "plot greeting: there is no flag --nmae; did you mean --name?"),
    ],
)
def test_mistakes_in_the_name_or_flags_of_a_new_verb(new_verb, capsys, words, says):
    with pytest.raises(SystemExit):
        main(words.split())
    assert says in capsys.readouterr().err


def test_a_new_verb_is_completed(new_verb):
    assert "greeting" in completion_script("bash")


def test_a_verb_without_a_place_comes_last(new_verb, tmp_path):
    (tmp_path / "plot_greeting.py").write_text(GREET.replace("ORDER", "OTHER"))
    assert list(in_order(find_verbs()))[-1] == "plot greeting"


@pytest.mark.parametrize("name", find_verbs())
def test_what_is_read_from_a_file_is_what_it_has(name):
    verb, module = find_verbs()[name], import_module(f"longstride.commands.verbs.{name.replace(' ', '_')}")
    assert verb.main is module.main
    assert verb.summary
    assert (module.main.__doc__ or "").startswith(verb.summary)
    assert verb.order == getattr(module, "ORDER", None), "a verb of the package has an ORDER"
    assert module.__doc__ == f"longstride {name}", "the module's docstring is the command"


def test_no_two_verbs_have_one_place():
    orders = [verb.order for verb in find_verbs().values()]
    assert len(set(orders)) == len(orders)


@pytest.mark.parametrize("name", find_verbs())
def test_help_shows_what_may_be_left_out(name):
    """A positional argument with a default stands in brackets; without them help says that it is required."""
    verb = find_verbs()[name]
    for parameter, hint in get_type_hints(verb.main, include_extras=True).items():
        notes = get_args(hint)[1:]
        if tyro.conf.Positional in notes:
            metavar = next((note.metavar for note in notes if hasattr(note, "metavar")), None)
            assert metavar, f"longstride {name}: {parameter} needs a name for help: tyro.conf.arg(metavar=...)"
            has_default = signature(verb.main).parameters[parameter].default is not Parameter.empty
            assert metavar.startswith("[") == has_default, parameter
