import io

import pytest
from rich.console import Console

from longstride.commands.main import main
from longstride.commands.presets import show
from longstride.model import PRESETS


def printed(dense, width=100):
    out = io.StringIO()
    show(dense, Console(file=out, width=width))
    return out.getvalue()


def test_every_preset_is_listed():
    text = printed(dense=False)
    assert all(f" {name} " in text for name in PRESETS)
    assert "94.9" in text
    assert "1,048,576" in text
    assert "-dense " in text


def test_nothing_is_cut_off_in_a_narrow_terminal():
    for width in (40, 59, 60, 70):
        assert "\u2026" not in printed(dense=False, width=width)


def test_dense_forms_on_request():
    assert all(f" {name}-dense " in printed(dense=True) for name in PRESETS)


def test_the_verb(capsys):
    main(["presets"])
    assert "imagenet64" in capsys.readouterr().out


def test_bad_input(capsys):
    with pytest.raises(SystemExit) as ended:
        main(["preset"])
    assert ended.value.code == 2
    assert "did you mean 'presets'?" in capsys.readouterr().err
