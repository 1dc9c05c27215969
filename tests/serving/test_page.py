"""The page in Chromium, against a server with a small model of each kind: make test-page"""

import base64
import json
import re
import struct
import wave
import zlib
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("playwright")
pytest.importorskip("fastapi")

from playwright.sync_api import expect

from longstride.commands.main import main
from longstride.data import samples
from longstride.data.audio import decode, encode
from tests.serving.browser import open_browser, open_server, open_tab

pytestmark = pytest.mark.page
SMALLER = ["--steps", "4", "--batch", "1", "--validate-every", "2", "--log-every", "1", "--validate-bytes", "512"]
SMALL_MODEL = ["--model.layers", "2", "--model.width", "32"]
NARROW = 320


@pytest.fixture(scope="module")
def browser():
    with open_browser() as started:
        yield started


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp("page")


@pytest.fixture(scope="module")
def text(folder):
    """The address of a server with a model of text, trained for a moment."""
    (folder / "book.txt").write_bytes(samples.text()[:40_000])
    main(["train", "text-small", "--data", str(folder / "book.txt"), "--out", str(folder / "text"), *SMALLER, *SMALL_MODEL])
    with open_server(folder / "text") as address:
        yield address


@pytest.fixture(scope="module")
def images(folder):
    np.save(folder / "patches.npy", samples.patches()[:200, :8, :8])
    settings = ["--data", str(folder / "patches.npy"), "--out", str(folder / "images"), *SMALLER, *SMALL_MODEL]
    main(["train", "image-small-dense", *settings])
    with open_server(folder / "images") as address:
        yield address


@pytest.fixture(scope="module")
def audio(folder):
    (folder / "piano.u8").write_bytes(samples.piano()[:60_000])
    settings = ["--data", str(folder / "piano.u8"), "--out", str(folder / "audio"), *SMALLER, *SMALL_MODEL]
    main(["train", "audio-small", *settings])
    with open_server(folder / "audio") as address:
        yield address


def write(tab, prompt, length=20):
    tab.get_by_label("Text", exact=True).fill(prompt)
    tab.get_by_label("Bytes").fill(str(length))
    tab.get_by_role("button", name="Continue").click()
    expect(tab.locator(".summary strong")).to_have_count(2)


def bits_of(tab) -> list[float]:
    return [float(text) for text in tab.locator(".summary strong").all_text_contents()]


def levels_of(tab) -> list[float]:
    """How strongly each character is shaded."""
    script = "cells => cells.map(cell => Number(cell.style.getPropertyValue('--level')))"
    return tab.eval_on_selector_all(".cell", script)


def test_writing_streams_and_is_measured(browser, text):
    with open_tab(browser, text) as tab:
        write(tab, "The Canterbury Tales", 25)
        assert all(0 < bits < 12 for bits in bits_of(tab))
        expect(tab.locator(".summary")).to_contain_text("20 bytes given")
        expect(tab.locator(".summary")).to_contain_text("25 bytes written")
        shown = "".join(tab.locator(".cell").all_text_contents())
        assert shown.startswith("The Canterbury Tales")
        assert tab.locator(".cell.boundary").count() == 1
        assert len({level for level in levels_of(tab) if 0 < level <= 1}) > 3


def test_the_seed_repeats_the_text(browser, text):
    with open_tab(browser, text) as tab:
        tab.get_by_label("another seed each time").uncheck()
        tab.get_by_label("Seed", exact=True).fill("7")
        write(tab, "One ", 30)
        first = tab.locator(".text").text_content()
        write(tab, "Two ", 10)
        write(tab, "One ", 30)
        assert tab.locator(".text").text_content() == first
        tab.get_by_label("another seed each time").check()
        write(tab, "One ", 30)
        assert tab.locator(".text").text_content() != first


def test_bits_of_a_pasted_text(browser, text):
    with open_tab(browser, text) as tab:
        pasted = samples.unseen_text()[3_000:5_000].tobytes().decode()  # Longer than the context.
        tab.get_by_label("Text", exact=True).fill(pasted)
        tab.get_by_role("button", name="Only bits").click()
        expect(tab.locator(".summary strong")).to_have_count(1)
        size = len(pasted.encode())
        expect(tab.locator(".summary")).to_contain_text(f"{size:,} bytes given")
        assert tab.locator(".cell").count() == len(pasted)


def test_going_on_continues_what_is_shown(browser, text):
    with open_tab(browser, text) as tab:
        write(tab, "Once", 10)
        tab.get_by_role("button", name="Go on").click()
        expect(tab.locator(".summary")).to_contain_text("14 bytes given")
        expect(tab.locator(".summary")).to_contain_text("10 bytes written")


def test_stop_ends_the_writing(browser, text):
    with open_tab(browser, text) as tab:
        tab.get_by_label("Text", exact=True).fill("Once upon a time")
        tab.get_by_label("Bytes").fill("60000")
        tab.get_by_role("button", name="Continue").click()
        expect(tab.locator(".summary")).to_contain_text("Writing")
        tab.get_by_role("button", name="Stop").click()
        expect(tab.locator(".summary strong")).to_have_count(2)
        expect(tab.get_by_role("button", name="Continue")).to_be_enabled()
        expect(tab.locator(".summary")).not_to_contain_text("60,000")


def test_looking_at_a_byte(browser, text):
    with open_tab(browser, text) as tab:
        write(tab, "The Canterbury Tales")
        tab.locator(".cell").nth(9).click()
        look = tab.get_by_role("complementary", name="One byte")
        expect(look).to_contain_text("Byte 9: r")
        assert look.locator(".bars li").count() in (8, 9)  # The byte itself comes last if it is not among the likely.
        expect(look.locator(".bars .actual")).to_have_count(1)
        expect(look.get_by_role("radio")).to_have_count(1 + 2 * 4)
        expect(tab.locator(".text")).to_have_class(re.compile("by-attention"))
        look.get_by_role("radio", name="layer 1, head 2").click()
        expect(look.locator(".places")).to_contain_text("layer 1, head 2: Block(32)")
        expect(look.locator(".places li").first).to_contain_text("%")
        body = {"bytes": list(b"The Canterbury Tales"), "position": 9}
        answer = tab.request.post(f"{text}/page/look", data=body).json()
        weights = np.frombuffer(base64.b64decode(answer["levels"]), np.uint8).reshape(2, 4, 10)[1, 2]
        # Key j has read byte j - 1, and nothing is read from the byte on.
        assert np.allclose(levels_of(tab)[:9], weights[1:] / weights[1:].max(), atol=0.001)
        assert not any(levels_of(tab)[9:])
        tab.get_by_label("bits", exact=True).check()
        expect(tab.locator(".text")).not_to_have_class(re.compile("by-attention"))
        look.get_by_role("button", name="next byte").click()
        expect(look).to_contain_text("Byte 10: b")
        look.get_by_role("button", name="close").click()
        expect(look).to_contain_text("Choose a byte")


def test_a_panel_shows_single_keys_among_thousands(browser, text):
    """A pixel of a panel is the largest of the weights there; the browser would leave most of them out."""
    draw = """async ([keys, columns, key]) => {
        const { matrixPanel } = await import("/static/look.js");
        const weights = new Float32Array(keys + 1);
        weights[key + 1] = 0.5;
        const canvas = matrixPanel(weights, columns, (share) => [255 * share, 0, 0]);
        const { data } = canvas.getContext("2d").getImageData(0, 0, canvas.width, canvas.height);
        const red = Array.from({ length: data.length / 4 }, (_, cell) => data[4 * cell]);
        const known = Array.from({ length: data.length / 4 }, (_, cell) => data[4 * cell + 3]);
        return [canvas.width, canvas.height, red, known];
    }"""
    with open_tab(browser, text) as tab:
        # Keys, columns, the canvas, and the cells of the matrix that a pixel stands for.
        for keys, columns, size, across, down in (
            (16_384, 128, (43, 32), 3, 4), (12_000, 128, (43, 32), 3, 3), (200, 32, (32, 7), 1, 1), (5, 32, (5, 1), 1, 1),
        ):  # fmt: skip
            for key in (0, 1, keys // 3, keys - 1):
                width, height, red, known = tab.evaluate(draw, [keys, columns, key])
                assert (width, height) == size
                row, column = divmod(key, min(columns, keys))
                expected = (row // down) * width + column // across
                assert [cell for cell, value in enumerate(red) if value] == [expected]
                assert known[expected] == 255


def test_layers_that_do_not_fit_are_fetched_one_by_one(browser, text):
    def thin(route):
        """As a server whose model has too many weights for one answer."""
        body = route.request.post_data_json
        route.continue_(post_data={"layers": [0], **body})

    with open_tab(browser, text) as tab:
        tab.route("**/page/look", thin)
        write(tab, "The Canterbury Tales")
        tab.locator(".cell").nth(5).click()
        look = tab.get_by_role("complementary", name="One byte")
        expect(look.get_by_role("radio")).to_have_count(1 + 4)
        look.get_by_label("Layers shown").select_option("layer 1")
        look.get_by_role("radio", name="layer 1, head 3").click()
        expect(look.locator(".places")).to_contain_text("layer 1, head 3")


def test_the_keyboard_alone(browser, text):
    with open_tab(browser, text) as tab:
        write(tab, "ab\ncd", 5)
        tab.get_by_role("listbox").focus()
        for key in ("ArrowRight", "ArrowDown", "ArrowUp", "ArrowRight", "Enter"):
            tab.keyboard.press(key)
        look = tab.get_by_role("complementary", name="One byte")
        expect(look).to_contain_text("Byte 2: line end")
        look.get_by_role("radio", name="mean of all heads").focus()
        tab.keyboard.press("ArrowRight")
        expect(look.get_by_role("radio", name="layer 0, head 0")).to_be_focused()
        expect(look.locator(".places")).to_contain_text("layer 0, head 0")
        tab.get_by_role("tab", name="Write").focus()
        tab.keyboard.press("ArrowRight")
        expect(tab.get_by_role("tab", name="About")).to_be_focused()
        expect(tab.get_by_role("tabpanel", name="About")).to_be_visible()
        tab.get_by_role("link", name="Skip to the content").focus()
        tab.keyboard.press("Enter")
        expect(tab.locator("main")).to_be_focused()
        expect(tab.get_by_role("tabpanel", name="About")).to_be_visible()


def test_every_control_has_a_name_and_a_visible_focus(browser, text):
    with open_tab(browser, text) as tab:
        write(tab, "abc", 3)
        tab.locator(".skip").focus()
        names = []
        tab.keyboard.press("Tab")
        while tab.evaluate("document.activeElement !== document.body"):
            outline, name = tab.evaluate("""() => {
                const at = document.activeElement;
                const name = at.getAttribute("aria-label") ?? (at.labels?.[0] ?? at).textContent;
                return [getComputedStyle(at).outlineStyle, name.trim()];
            }""")
            assert outline != "none", name
            names.append(name)
            tab.keyboard.press("Tab")
        assert all(names)
        assert names[0] == "Write"
        assert names[-1].startswith("Text, byte by byte")
        assert len(names) > 10


def test_bytes_are_shown_and_never_obeyed(browser, text):
    """Markup stays text; what cannot be printed, and bytes that are no character, become escapes."""
    with open_tab(browser, text) as tab:
        hostile = "<img src=x onerror=alert(1)>é日\u202ea\x07\u0301🙂"
        write(tab, hostile, 60)
        cells = tab.locator(".cell").all_text_contents()
        assert cells[: len(hostile)] == [*hostile[:30], "U+202E", "a", "\\x07", "◌\u0301", "🙂"]
        assert not tab.locator(".text img").count()
        assert any(re.fullmatch(r"\\x[89a-f][0-9a-f]", cell) for cell in cells), "the model is random"
        tab.locator(".cell", has_text="日").click()
        look = tab.get_by_role("complementary", name="One byte")
        expect(look).to_contain_text("Byte 30: \\xe6")  # The first of its three bytes.
        look.get_by_role("button", name="next byte").click()
        expect(look).to_contain_text("Byte 31: \\x97")


def test_a_wrong_value_is_told_and_the_page_goes_on(browser, text):
    with open_tab(browser, text) as tab:
        tab.get_by_label("Text", exact=True).fill("")
        tab.get_by_role("button", name="Continue").click()
        expect(tab.get_by_role("alert")).to_have_text("Give a text to continue.")
        write(tab, "abc", 3)
        expect(tab.get_by_role("alert")).to_be_hidden()


def test_an_error_of_the_server_is_told(browser, text):
    with open_tab(browser, text, expected="400") as tab:
        tab.get_by_label("Text", exact=True).fill("x" * 70_000)
        tab.get_by_role("button", name="Only bits").click()
        expect(tab.get_by_role("alert")).to_contain_text("give at most 65,536")
        expect(tab.locator(".summary")).to_have_text("70,000 bytes, not measured.")


def test_about(browser, text):
    with open_tab(browser, text) as tab:
        tab.get_by_role("tab", name="About").click()
        panel = tab.get_by_role("tabpanel", name="About")
        expect(panel).to_contain_text("2 layers of width 32, 4 heads each")
        expect(panel).to_contain_text("Best validation")
        assert len(panel.locator("polyline.training").get_attribute("points").split()) >= 3
        expect(panel.locator("circle.validation")).to_have_count(2)


def test_the_card_of_a_saved_model(browser, folder, text):
    main(["export", str(folder / "text"), str(folder / "saved")])
    card = json.loads((folder / "saved" / "card.json").read_text())
    figure = {"data": "a book", "bytes": 1234, "min_context": 256, "bits_per_byte": 2.3456}
    card |= {"name": "carded", "licence": "CC BY 4.0", "limits": "It knows <b>nothing</b>.", "figures": [figure]}
    (folder / "saved" / "card.json").write_text(json.dumps(card))
    with open_server(folder / "saved") as address, open_tab(browser, address) as tab:
        expect(tab.locator("#model")).to_contain_text("carded")
        tab.get_by_role("tab", name="About").click()
        panel = tab.get_by_role("tabpanel", name="About")
        expect(panel.get_by_role("heading", name="Licence")).to_be_visible()
        expect(panel).to_contain_text("CC BY 4.0.")
        expect(panel).to_contain_text("It knows <b>nothing</b>.")
        expect(panel.get_by_role("row").nth(1)).to_have_text("a book1,2342562.346")


BROKEN_WORDS = """() => {
    const texts = document.createTreeWalker(document.getElementById("about"), NodeFilter.SHOW_TEXT);
    const broken = [];
    while (texts.nextNode()) {
        const text = texts.currentNode;
        if (text.parentElement.closest("pre, svg")) continue;
        for (const { 0: word, index } of text.data.matchAll(/[\\p{L}\\p{N}_.,]+/gu)) {
            const range = document.createRange();
            range.setStart(text, index);
            range.setEnd(text, index + word.length);
            if (new Set(Array.from(range.getClientRects(), (box) => box.top)).size > 1) broken.push(word);
        }
    }
    return broken;
}"""


@pytest.mark.parametrize("name", ["text", "images32", "piano"])
def test_a_narrow_card_breaks_no_word(browser, name):
    with open_server(Path(name)) as address, open_tab(browser, address) as tab:
        tab.locator("#tab-about").click()
        for width in (NARROW, 360, 600):
            tab.set_viewport_size({"width": width, "height": 800})
            expect(tab.get_by_role("columnheader", name="bits per byte")).to_be_visible()
            assert tab.get_by_role("row").count() > 1
            assert tab.evaluate(BROKEN_WORDS) == []


def test_a_narrow_table_shows_its_last_column(browser, folder, text):
    main(["export", str(folder / "text"), str(folder / "narrow")])
    card = json.loads((folder / "narrow" / "card.json").read_text())
    name = "the last 5,000,000 bytes of enwik8, of which a/very/long/name/without/any/space/tells, bundled with longstride"
    card |= {"figures": [{"data": name, "bytes": 5_000_000, "min_context": 12_288, "bits_per_byte": 2.3456}]}
    (folder / "narrow" / "card.json").write_text(json.dumps(card))
    with open_server(folder / "narrow") as address, open_tab(browser, address, width=NARROW, height=800) as tab:
        tab.locator("#tab-about").click()
        expect(tab.get_by_role("cell", name="2.346")).to_be_visible()
        assert tab.eval_on_selector(".scroll", "box => box.scrollWidth - box.clientWidth") == 0
        for cell in ("2.346", "5,000,000"):
            box = tab.get_by_role("cell", name=cell, exact=True).bounding_box()
            assert 0 <= box["x"] < box["x"] + box["width"] <= NARROW


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("kind", ["text", "images", "audio"])
def test_fits_a_narrow_window_in_light_and_dark(browser, kind, dark, request):
    with open_tab(browser, request.getfixturevalue(kind), width=NARROW, height=800, dark=dark) as tab:
        for name in ("work", "about"):
            tab.locator(f"#tab-{name}").click()
            assert tab.evaluate("document.documentElement.scrollWidth") <= NARROW
        background = tab.evaluate("getComputedStyle(document.body).backgroundColor")
        channels = [int(number) for number in re.findall(r"\d+", background)]
        assert (max(channels) < 60) if dark else (min(channels) > 200)


def pixels_of(tab) -> list[list[int]]:
    """Red, green, blue and opacity of the pixels of each result."""
    script = "every => every.map(canvas => [...canvas.getContext('2d').getImageData(0, 0, 8, 8).data])"
    return tab.eval_on_selector_all(".results canvas", script)


def test_completing_an_image(browser, images):
    with open_tab(browser, images) as tab:
        expect(tab.get_by_role("radiogroup", name="Bundled images").get_by_role("radio")).to_have_count(16)
        tab.get_by_role("radio", name="image 3", exact=True).click()
        tab.get_by_label("Samples").fill("4")
        tab.get_by_role("button", name="Complete it").click()
        results = tab.get_by_role("radiogroup", name="The original and its completions")
        expect(results.locator(".caption", has_text="bits/byte")).to_have_count(5)
        original, *completed = pixels_of(tab)
        for sample in completed:
            assert sample[: 4 * 8 * 4] == original[: 4 * 8 * 4]  # The upper half is kept.
            assert sample[3::4] == [255] * 64  # All pixels are there.
        assert len({tuple(sample) for sample in completed}) == 4


def test_looking_at_a_pixel(browser, images):
    with open_tab(browser, images) as tab:
        tab.locator("canvas.big").focus()
        for key in ("ArrowRight", "ArrowRight", "ArrowDown", "Enter"):
            tab.keyboard.press(key)
        look = tab.get_by_role("complementary", name="One byte")
        expect(look).to_contain_text("Row 1, column 1: red")
        expect(look.locator(".places li").first).to_contain_text(re.compile("left|up|start"))
        expect(tab.get_by_label("attention", exact=True)).to_be_checked()
        look.get_by_role("radio", name="layer 1, head 1").click()
        look.get_by_role("button", name="next byte").click()
        expect(look).to_contain_text("Row 1, column 1: green")
        box = tab.locator("canvas.big").bounding_box()
        tab.locator("canvas.big").click(position={"x": box["width"] - 5, "y": box["height"] - 5})
        expect(look).to_contain_text("Row 7, column 7: red")
        tab.get_by_label("bits", exact=True).check()
        expect(tab.get_by_text("8 or more")).to_be_visible()


def png(width, height, colour) -> bytes:
    """A picture of one colour."""

    def chunk(kind, data):
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    rows = (b"\0" + bytes(colour) * width) * height
    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(rows)) + chunk(b"IEND", b"")


def test_uploading_an_image(browser, images, tmp_path):
    (tmp_path / "red.png").write_bytes(png(50, 20, (200, 30, 10)))
    (tmp_path / "bad.png").write_bytes(b"no picture")
    with open_tab(browser, images) as tab:
        tab.get_by_label("Or one of your own").set_input_files(tmp_path / "red.png")
        expect(tab.get_by_role("radio", name="image 1", exact=True)).not_to_be_checked()
        (pixels,) = pixels_of(tab)
        assert pixels == [200, 30, 10, 255] * 64
        tab.get_by_label("Or one of your own").set_input_files(tmp_path / "bad.png")
        expect(tab.get_by_role("alert")).to_contain_text("bad.png is no picture")


def test_continuing_a_sound(browser, audio):
    with open_tab(browser, audio) as tab:
        tab.get_by_label("Milliseconds").fill("10")
        tab.get_by_role("button", name="Continue").click()
        expect(tab.locator(".summary strong")).to_have_count(2)
        expect(tab.locator(".summary").first).to_contain_text("10 ms new")
        play = tab.get_by_role("button", name="Play", exact=True)
        # The sound is so short that it may be over before anybody looks: the button keeps what it has said.
        play.evaluate("""button => {
            button.dataset.said = "";
            const note = () => { button.dataset.said += `${button.textContent}. `; };
            new MutationObserver(note).observe(button, { childList: true });
        }""")
        play.click()
        expect(tab.locator("[data-said]")).to_have_attribute("data-said", re.compile(r"Stop playing\. .*Play\. $"))
        tab.get_by_role("button", name="Play what is new").click()


def test_looking_at_a_sample(browser, audio):
    with open_tab(browser, audio) as tab:
        wave_canvas = tab.locator("canvas.wave").first
        wave_canvas.click(position={"x": 100, "y": 40})
        look = tab.get_by_role("complementary", name="One byte")
        expect(look.locator("h2")).to_have_text(re.compile(r"[\d.]+ ms: .0\.\d{3}"))
        before = look.locator("h2").text_content()
        wave_canvas.focus()
        tab.keyboard.press("ArrowRight")
        tab.keyboard.press("Enter")
        expect(look.locator("h2")).not_to_have_text(before)
        expect(look.locator(".places li").first).to_contain_text("back")
        expect(tab.get_by_label("attention", exact=True)).to_be_checked()


def test_mu_law_in_the_browser_is_ours(browser, audio):
    codes = np.arange(256, dtype=np.uint8)
    points = np.linspace(-1, 1, 501)
    with open_tab(browser, audio) as tab:
        decoded, encoded = tab.evaluate(
            """async (points) => {
                const { soundOf, codeOf } = await import("/static/bytes.js");
                return [Array.from({ length: 256 }, (_, code) => soundOf(code)), points.map(codeOf)];
            }""",
            points.tolist(),
        )
    assert np.allclose(decoded, decode(codes))
    assert encoded == encode(points).tolist()


def test_the_scale_gets_darker_evenly_in_light_and_lighter_in_dark(browser, text):
    """So that it is read without telling hues apart."""
    for dark in (False, True):
        with open_tab(browser, text, dark=dark) as tab:
            write(tab, "abc", 3)
            for kind in ("bits", "attention"):
                script = "parts => parts.map(part => getComputedStyle(part).backgroundColor)"
                colours = tab.eval_on_selector_all(f".ramp.{kind} span", script)
                lightness = [float(re.match(r"oklch\(([\d.]+)", colour)[1]) for colour in colours]
                assert lightness == sorted(lightness, reverse=not dark)
                assert abs(lightness[-1] - lightness[0]) > 0.25


def test_uploading_a_sound(browser, audio, tmp_path):
    with wave.open(str(tmp_path / "tone.wav"), "wb") as file:
        file.setnchannels(1)
        file.setsampwidth(2)
        file.setframerate(24_000)
        file.writeframes((8_000 * np.sin(np.arange(1_200) / 5)).astype("<i2").tobytes())
    with open_tab(browser, audio) as tab:
        tab.get_by_label("Or one of your own").set_input_files(tmp_path / "tone.wav")
        expect(tab.locator(".summary").first).to_contain_text("50 ms given")
        expect(tab.get_by_label("Bundled sound")).to_have_value("")  # Any can be chosen again.
        tab.get_by_label("Bundled sound").select_option("0")
        expect(tab.get_by_label("Or one of your own")).to_have_value("")


def test_a_key_is_asked_for(browser, folder, text, monkeypatch):
    monkeypatch.setenv("LONGSTRIDE_API_KEY", "secret")
    with open_server(folder / "text") as address:
        context = browser.new_context()
        tab = context.new_page()
        tab.goto(address)
        expect(tab.get_by_role("alert")).to_have_count(0)
        tab.get_by_label("API key").fill("wröng“")  # No header can hold it: it is refused by the dialog.
        tab.get_by_role("button", name="Use it").click()
        assert not tab.get_by_label("API key").evaluate("input => input.checkValidity()")
        tab.get_by_label("API key").fill("wrong")
        tab.get_by_role("button", name="Use it").click()
        expect(tab.get_by_role("alert")).to_contain_text("does not know the key")
        tab.get_by_label("API key").fill(" secret ")
        tab.get_by_role("button", name="Use it").click()
        tab.locator("html[data-ready]").wait_for()
        write(tab, "abc", 3)
        # A key for several requests at a time.
        tab.evaluate("sessionStorage.clear()")
        tab.evaluate("""async () => {
            const { getJson } = await import("/static/api.js");
            window.several = Promise.all([1, 2, 3].map(() => getJson("/v1/models")));
        }""")
        tab.locator("dialog[open]").wait_for()
        tab.get_by_label("API key").fill("secret")
        tab.get_by_role("button", name="Use it").click()
        assert len(tab.evaluate("window.several")) == 3
        context.close()
