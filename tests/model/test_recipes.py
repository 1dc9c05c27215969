import pytest

from longstride.model import PRESETS, preset
from longstride.model.recipes import RECIPES, apply_recipe
from tests.model.small import config

MODERN = ("text-small", "text-medium", "image-medium", "audio-medium", "text-modern")
PAPERS = [name for name in PRESETS if name not in MODERN]


@pytest.mark.parametrize("name", PAPERS)
def test_the_papers_recipe_is_that_of_its_presets(name):
    assert preset(name, recipe="paper") == preset(name)
    assert preset(name).beyond_the_paper == []


def test_the_modern_preset_has_the_modern_recipe():
    made = preset("text-modern")
    assert preset("text-modern", recipe="modern") == made
    assert (made.layers, made.width, made.heads, made.context, made.precision) == (8, 768, 12, 8192, "bfloat16")
    assert made.parameters == 57_410_400
    assert preset("text-modern", recipe="paper").embedding == "matrix(128)"


def test_the_small_text_preset_has_the_modern_recipe_and_can_have_the_papers():
    assert preset("text-small", recipe="modern") == preset("text-small")
    paper = preset("text-small", recipe="paper")
    assert paper.beyond_the_paper == []
    assert (paper.embedding, paper.init) == ("matrix(32)", "release")


@pytest.mark.parametrize("name", PRESETS)
def test_there_and_back(name):
    """Positions of a stream are rotary, and a matrix again; those of an image stay."""
    modern = preset(name, recipe="modern")
    is_image = modern.embedding.startswith("image(")
    assert modern.embedding == (preset(name).embedding if is_image else "rotary")
    fields = {name: getattr(modern, name) for name in RECIPES["modern"]}
    assert fields == {"init": "modern", "norm": "rms", "qk_norm": True, "last_bytes": 3}
    assert apply_recipe(modern, "paper").beyond_the_paper == []


def test_the_period_of_patterns():
    found = {
        text: config(pattern=text).period for text in ("local(7)", "dense()", "column(5) + local(9)", "merged(fixed(6, 2))")
    }
    assert found == {"local(7)": 4, "dense()": 4, "column(5) + local(9)": 5, "merged(fixed(6, 2))": 6}


def test_an_unknown_recipe():
    with pytest.raises(ValueError, match=r"^preset: recipe must be one of paper, modern, got 'new'$"):
        preset("enwik8", recipe="new")
