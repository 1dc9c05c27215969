"""Makes the screenshots of docs/page.md: python -m tests.serving.screenshots text images32 piano [RUN]

Text, images and sound: each is a run, a saved model, or the name of one that comes with longstride. RUN: one of
text-small on wikipedia.xz, whose curve is shown.
"""

import sys
from collections.abc import Callable
from pathlib import Path

from PIL import Image
from playwright.sync_api import Browser, Page, expect

from tests.pages import ROOT
from tests.serving.browser import open_browser, open_server, open_tab

FOLDER = ROOT / "docs" / "pictures"
COLOURS = 200
"""Of a picture: enough for a page, and half of the bytes."""
NARROW = 360
LINE = "The '''Canterbury Tales''' is a collection of stories written by [[Geoffrey Chaucer]] in the [[14th century]]"


def write(tab: Page) -> None:
    tab.get_by_label("Text", exact=True).fill(LINE)
    tab.get_by_label("Temperature").fill("0.8")
    tab.get_by_role("button", name="Continue").click()
    expect(tab.locator(".summary strong")).to_have_count(2)


def look(tab: Page) -> None:
    write(tab)
    tab.locator(".cell").nth(LINE.index("written")).click()
    tab.locator(".look[data-position]").wait_for()
    tab.get_by_role("radio", name="layer 1, head 1").click()


def complete(tab: Page) -> None:
    tab.get_by_role("radio", name="image 4", exact=True).click()
    tab.get_by_role("button", name="Complete it").click()
    expect(tab.locator(".caption", has_text="bits/byte")).to_have_count(5)


def show_bits(tab: Page) -> None:
    complete(tab)
    tab.get_by_label("bits", exact=True).check()


def look_at_a_pixel(tab: Page) -> None:
    complete(tab)
    tab.locator("canvas.big").click(position={"x": 200, "y": 310})
    tab.locator(".look[data-position]").wait_for()


def listen(tab: Page) -> None:
    tab.get_by_label("Milliseconds").fill("250")
    tab.get_by_role("button", name="Continue").click()
    expect(tab.locator(".summary strong")).to_have_count(2)
    wave = tab.locator("canvas.wave").first
    wave.click(position={"x": 0.6 * wave.evaluate("canvas => canvas.clientWidth"), "y": 60})
    tab.locator(".look[data-position]").wait_for()
    tab.get_by_role("radio", name="layer 1, head 0").click()


def about(tab: Page) -> None:
    tab.get_by_role("tab", name="About").click()


def take(browser: Browser, address: str, name: str, prepare: Callable[[Page], None], dark: bool, width: int = 1180) -> None:
    with open_tab(browser, address, width, 860, dark) as tab:
        prepare(tab)
        height = tab.evaluate("document.documentElement.scrollHeight")
        tab.set_viewport_size({"width": width, "height": height})  # What is fixed to the window is then whole.
        tab.evaluate("window.scrollTo(0, 0)")
        tab.mouse.move(0, 0)
        path = FOLDER / f"page-{name}.png"
        tab.screenshot(path=path, full_page=True)
    with Image.open(path) as picture:
        picture.convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE).save(path, optimize=True)
    print(f"{path.relative_to(ROOT)}: {path.stat().st_size:,} bytes")


def main(text: Path, images: Path, audio: Path, run: Path | None = None) -> None:
    with open_browser() as browser:
        with open_server(text) as address:
            take(browser, address, "write", write, dark=False)
            take(browser, address, "look", look, dark=False)
            take(browser, address, "look-dark", look, dark=True)
            take(browser, address, "look-narrow", look, dark=False, width=NARROW)
            take(browser, address, "card-narrow", about, dark=False, width=NARROW)
        with open_server(images) as address:
            take(browser, address, "images", look_at_a_pixel, dark=False)
            take(browser, address, "images-dark", show_bits, dark=True)
        with open_server(audio) as address:
            take(browser, address, "audio", listen, dark=False)
            take(browser, address, "audio-dark-narrow", listen, dark=True, width=NARROW)
        if run is None:
            return
        with open_server(run) as address:
            take(browser, address, "about", about, dark=False)
            take(browser, address, "about-dark-narrow", about, dark=True, width=NARROW)


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
