"""Chromium, driven by Playwright, and a server of its own for each model: for the tests of the page and its screenshots."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from playwright.sync_api import Browser, Page, expect, sync_playwright

FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--autoplay-policy=no-user-gesture-required",
]  # fmt: skip
PATIENCE = 60_000
"""Milliseconds that the page may take for anything."""
expect.set_options(timeout=PATIENCE)
ADDRESS = re.compile(r"http://(\[[\w:]+\]|[\w.]+):\d+")


@contextmanager
def open_server(folder: Path, *flags: str) -> Iterator[str]:
    """Runs `longstride serve` on a free port. Yields its address."""
    command = [sys.executable, "-m", "longstride", "serve", str(folder), "--port", "0", *flags]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=os.environ)
    assert process.stdout is not None
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            if address := ADDRESS.search(line):
                yield address[0]
                break
        else:
            raise AssertionError(f"longstride serve ended: {''.join(said)}")
    finally:
        process.terminate()
        process.communicate(timeout=30)


@contextmanager
def open_browser() -> Iterator[Browser]:
    """Starts Chromium with an empty profile."""
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    assert path, "there is no Chromium; install it: apt-get install chromium"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


@contextmanager
def open_tab(
    browser: Browser, address: str, width: int = 1280, height: int = 900, dark: bool = False, expected: str | None = None
) -> Iterator[Page]:  # fmt: skip
    """Opens the page. At the end nothing may have gone wrong in the browser: no error or warning in its console, no
    exception, no request that failed. `expected`: a pattern of errors that are part of the test."""
    scheme = "dark" if dark else "light"
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce")
    context.set_default_timeout(PATIENCE)
    tab, wrong = context.new_page(), list[str]()
    tab.on("console", lambda message: wrong.append(message.text) if message.type in ("error", "warning") else None)
    tab.on("pageerror", lambda error: wrong.append(str(error)))
    tab.on("request", lambda request: None if request.url.startswith((address, "blob:")) else wrong.append(request.url))
    try:
        tab.goto(address)
        tab.locator("html[data-ready]").wait_for()
        yield tab
        unexpected = [message for message in wrong if expected is None or not re.search(expected, message)]
        assert not unexpected, unexpected
    finally:
        context.close()
