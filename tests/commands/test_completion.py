"""The scripts in real shells. bash is on every machine that runs the tests; zsh and fish only on some."""

import base64
import os
import re
import shutil
import subprocess
import sys
import zlib

import pytest

pytest.importorskip("tyro")

from longstride.commands.completion import CHANGES, completion_script
from longstride.commands.main import main
from longstride.commands.verbs import find_verbs

SETUP = {
    "bash": """source ./script
        complete_words() {
            COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _tyro_longstride; printf '%s\\n' "${COMPREPLY[@]}"
        }""",
    "zsh": """compdef() { }
        source ./script
        _describe() { for one in ${(P)2}; do print -r -- ${one%%:*}; done }
        _files() { ls $words[-1]* }
        complete_words() { words=("$@"); CURRENT=$#; _tyro_longstride }""",
    "fish": """source ./script
        function complete_words; complete -C "$argv" | string replace -r '\\t.*' ''; end""",
}
QUIET = {"bash": "--norc", "zsh": "-f", "fish": "--no-config"}


@pytest.fixture(scope="module", params=list(CHANGES))
def complete(request, tmp_path_factory):
    """A function from lines that end at the cursor to the words that this shell offers for each, all in one process."""
    shell = request.param
    if shutil.which(shell) is None:
        pytest.skip(f"needs {shell}")
    folder = tmp_path_factory.mktemp("completion")
    (folder / "script").write_text(completion_script(shell))
    (folder / "run-1").touch()

    def run(*lines):
        calls = [f"echo '>'; complete_words {' '.join(repr(word) for word in line.split(' '))}" for line in lines]
        program = "\n".join([SETUP[shell], *calls])
        command = [shell, QUIET[shell], "-c", program]
        path = os.pathsep.join([os.path.dirname(sys.executable), os.environ["PATH"]])  # The script starts python3.
        environment = {**os.environ, "PATH": path}
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder, env=environment)
        assert done.stderr == ""
        return [set(part.split()) for part in done.stdout.split(">\n")[1:]]

    run.shell, run.folder = shell, folder
    return run


def test_verbs_presets_and_flags(complete):
    expected = {
        "longstride tr": {"train"},
        "longstride plot a": {"attention"},
        "longstride help tr": {"train"},
        "longstride train text-s": {"text-small"},
        "longstride train text-small --model.lay": {"--model.layers"},
        "longstride train text-small --optimizer.name a": {"adamw", "adafactor"},
        "longstride sample RUN --temp": {"--temperature"},
    }
    *offered, verbs = complete(*expected, "longstride ")
    assert dict(zip(expected, offered)) == expected
    assert {name.split()[0] for name in find_verbs()} <= verbs


FLAG = "'Residual blocks, N in the paper. (default: 30)"


@pytest.mark.parametrize("shell", ["bash", "zsh"])
def test_a_flag_has_the_default_of_its_preset(shell):
    assert FLAG in completion_script(shell)


def test_a_script_fits_into_one_argument_of_a_process():
    """fish passes it so; Linux allows 128 KiB."""
    script = completion_script("fish")
    assert len(script.encode()) < 2**17 - 1024
    table = re.search(r"b64decode\('(.*?)'\)", script)[1]
    assert FLAG in zlib.decompress(base64.b64decode(table)).decode()


def test_files_where_no_verb_or_flag_fits(complete):
    offered = complete("longstride eval ru", "longstride train text-small --data ru")
    if complete.shell == "bash":  # It completes files itself where a function has nothing to offer.
        program = "source ./script; complete -p longstride"
        done = subprocess.run(["bash", "--norc", "-c", program], capture_output=True, text=True, cwd=complete.folder)
        assert done.stdout == "complete -o bashdefault -o default -F _tyro_longstride longstride\n"
        assert offered == [set(), set()]
    else:
        assert offered == [{"run-1"}, {"run-1"}]


@pytest.mark.parametrize("name", CHANGES)
def test_the_changed_lines_are_those_of_this_tyro(name, capsys):
    main(["completion", name])
    script = capsys.readouterr().out
    for old, new in CHANGES[name].items():
        assert new in script
        assert script.count(old) == script.count(new) * new.count(old)
    spec = next(line for line in script.splitlines() if "COMPLETION_SPEC = " in line)
    assert "\\n" not in spec


def test_a_shell_that_tyro_does_not_know(monkeypatch):
    monkeypatch.setitem(CHANGES, "elvish", {})
    with pytest.raises(ValueError, match=r"completion: tyro .* has none for elvish; update it: pip install -U tyro"):
        completion_script("elvish")
