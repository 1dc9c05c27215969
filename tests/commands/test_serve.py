"""longstride serve and longstride play, up to the server itself, which tests/serving has."""

import socket
import webbrowser

import pytest

from longstride.commands import play as play_module
from longstride.commands import serve as serve_module
from longstride.commands.main import main
from longstride.serving.settings import ServeSettings
from tests.model.small import model


@pytest.fixture
def folder(tmp_path):
    model().save_pretrained(tmp_path / "model")
    return tmp_path / "model"


def refused(capsys, *words):
    with pytest.raises(SystemExit) as end:
        main(list(map(str, words)))
    assert end.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_bad_arguments(capsys, folder, tmp_path):
    assert "serve: nowhere is no run and no saved model" in refused(capsys, "serve", "nowhere")
    assert "port must be at most 65535, got 99999" in refused(capsys, "serve", folder, "--port", "99999")
    assert "streams must be" in refused(capsys, "serve", folder, "--streams", "0")
    assert "queue must be" in refused(capsys, "serve", folder, "--queue", "-1")
    assert "overflow" in refused(capsys, "serve", folder, "--overflow", "wrap")
    message = refused(capsys, "serve", folder, "--api-key-file", tmp_path / "no-such-file")
    assert message.startswith("longstride: serve: api_key_file = ")
    assert message.endswith("no-such-file' cannot be read: No such file or directory; give a file with a key")
    assert "give --kind" in refused(capsys, "serve", folder, "--port", "0")
    message = refused(capsys, "serve", folder, "--host", "256.1.1.1")
    assert "serve: cannot listen on host = '256.1.1.1', port = 8000" in message


def test_a_port_that_is_in_use(capsys, folder):
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        message = refused(capsys, "serve", folder, "--kind", "text", "--port", port)
    assert f"cannot listen on host = '127.0.0.1', port = {port}: Address already in use" in message


def test_says_which_extra_is_missing(capsys, folder, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "uvicorn", None)
    assert "longstride serve needs uvicorn: pip install 'longstride[serve]'" in refused(capsys, "serve", folder)


@pytest.mark.parametrize(
    ("host", "local"), [("127.0.0.1", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("example.org", False)]
)
def test_who_reaches_it(host, local):
    assert ServeSettings(host=host).is_local == local


def test_play_opens_a_browser(folder, monkeypatch, capsys):
    calls, opened = [], []
    monkeypatch.setattr(play_module, "serve", lambda *args: calls.append(args))
    monkeypatch.setattr(webbrowser, "open", lambda address: opened.append(address) or True)
    main(["play", str(folder)])
    main(["play", str(folder), "--no-browser", "--streams", "3"])
    assert [settings.streams for _, settings, _ in calls] == [None, 3]
    for path, settings, show in calls:
        assert (path, settings.port, settings.overflow, settings.is_local) == (folder, 0, "slide", True)
        show("http://127.0.0.1:5")
    assert opened == ["http://127.0.0.1:5"]
    assert "open http://127.0.0.1:5 in a browser" in capsys.readouterr().err


def test_play_takes_the_first_model_that_is_here(monkeypatch, capsys):
    calls = []
    monkeypatch.setattr(play_module, "serve", lambda *args: calls.append(args))
    monkeypatch.setattr(play_module, "find_settings", lambda *args: None)
    monkeypatch.setattr(play_module, "is_here", lambda name: name == "piano")
    main(["play"])
    assert str(calls[0][0]) == "piano"
    monkeypatch.setattr(play_module, "is_here", lambda name: False)
    assert "play: give a run or a saved model; the model text is not here" in refused(capsys, "play")


@pytest.mark.parametrize(("flags", "expected"), [([], "64 samples"), (["--streams", "3"], "3 samples")])
def test_says_how_many_samples_there_is_room_for(capsys, folder, monkeypatch, flags, expected):
    monkeypatch.setattr("uvicorn.Server.run", lambda self, sockets: sockets[0].close())
    main(["serve", str(folder), "--kind", "text", "--port", "0", *flags])
    (line,) = capsys.readouterr().err.splitlines()
    assert f"{expected} at once, which take 1 MiB (--streams), 256 may wait" in line


def test_addresses():
    for host, expected in (("127.0.0.1", "http://127.0.0.1:"), ("0.0.0.0", "http://127.0.0.1:"), ("::1", "http://[::1]:")):
        try:
            listener = serve_module._listen(ServeSettings(host=host, port=0))
        except ValueError:
            assert host == "::1"  # A machine without IPv6.
            continue
        with listener:
            assert serve_module._address(listener).startswith(expected)
