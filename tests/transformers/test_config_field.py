"""longstride_pattern in configs: saved folders attend as they did, and bad values are refused when they are read."""

import json

import pytest
import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GlmMoeDsaConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    Qwen3NextConfig,
    RecurrentGemmaConfig,
)

from longstride.transformers import set_attention_pattern
from tests.transformers.test_attention import CONFIGS, SIZES, make, tokens
from tests.transformers.test_folder import run_python
from tests.transformers.test_masks import windowed


@pytest.mark.parametrize("name", CONFIGS)
@pytest.mark.parametrize("pattern", ["local(5) | column(7)", ["local(3)", "local(2), column(5), dense, block(4)"]])
def test_a_saved_model_keeps_its_pattern(tmp_path, name, pattern):
    """Also when what was loaded is saved again, and when the config is loaded first."""
    model = make(name, pattern)
    expected = model(tokens()).logits
    for folder in (tmp_path / "first", tmp_path / "again"):
        model.save_pretrained(folder)
        model = AutoModelForCausalLM.from_pretrained(folder)
        assert torch.equal(model(tokens()).logits, expected)
        config = AutoConfig.from_pretrained(folder)
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder, config=config)(tokens()).logits, expected)


def test_layers_with_a_window_are_saved_too(tmp_path):
    model = windowed(pattern=[None, "local(3)"])
    model.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).eval()
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_another_implementation_is_used_when_asked_for(tmp_path):
    model = make()
    model.save_pretrained(tmp_path)
    dense = AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="sdpa")
    assert dense.config._attn_implementation == "sdpa"
    assert not torch.equal(dense(tokens()).logits, model(tokens()).logits)


def test_what_was_switched_back_is_saved_with_its_pattern(tmp_path):
    """By set_attn_implementation and by from_pretrained alike."""
    model = make()
    expected = model(tokens()).logits
    for folder in (tmp_path / "switched", tmp_path / "loaded"):
        model.set_attn_implementation("sdpa")
        model.save_pretrained(folder)
        assert json.loads((folder / "config.json").read_text())["attn_implementation"] == "longstride"
        assert torch.equal(AutoModelForCausalLM.from_pretrained(folder)(tokens()).logits, expected)
        model = AutoModelForCausalLM.from_pretrained(folder, attn_implementation="sdpa")
        assert not torch.equal(model(tokens()).logits, expected)


def test_folders_that_do_not_name_the_implementation_keep_the_pattern(tmp_path):
    model, path = make(), tmp_path / "config.json"
    model.save_pretrained(tmp_path)
    content = json.loads(path.read_text())
    assert content.pop("attn_implementation") == "longstride"
    path.write_text(json.dumps(content))
    assert torch.equal(AutoModelForCausalLM.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)


def test_the_text_model_of_a_larger_one_keeps_its_pattern(tmp_path):
    vision = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    config = LlavaConfig(
        text_config={"model_type": "llama", **SIZES}, image_token_index=52,
        vision_config={"model_type": "clip_vision_model", "image_size": 8, "patch_size": 4, **vision},
    )  # fmt: skip
    model = LlavaForConditionalGeneration(config).eval()
    with pytest.raises(ValueError, match="'llava' has no single stack of layers; give its text model alone"):
        set_attention_pattern(model, "local(3)")
    set_attention_pattern(model.model.language_model, "local(3)")
    model.save_pretrained(tmp_path)
    again = LlavaForConditionalGeneration.from_pretrained(tmp_path).eval()
    given = tokens() % 50
    assert torch.equal(again(input_ids=given).logits, model(input_ids=given).logits)


@pytest.mark.slow
def test_without_longstride_the_folder_is_refused(tmp_path):
    make().save_pretrained(tmp_path / "model")
    script = """
import sys
from transformers import AutoModelForCausalLM
try:
    AutoModelForCausalLM.from_pretrained(sys.argv[1])
except ValueError as error:
    sys.exit(0 if 'attn_implementation="longstride"' in str(error) else 2)
sys.exit(1)
"""
    run_python(script, tmp_path / "model", tmp_path=tmp_path)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (7, "LlamaConfig: longstride_pattern must be one for all layers or a list with one for each of 2, got 7"),
        ({"0": "local(3)"}, "longstride_pattern must be one for all layers or a list"),
        (["local(3)"], "a list with one for each of 2, got 1 entries"),
        (["local(3)"] * 3, "a list with one for each of 2, got 3 entries"),
        (["local(3)", 7], r"longstride_pattern\[1\] must be a Pattern or its text, got 7"),
        (["local(3)", None], r"longstride_pattern\[1\] must be a Pattern or its text, got None"),
        ("locl(3)", "there is no pattern"),
        ("local(3), local(2)", "has 2 patterns for 4 heads; give 1 or 4"),
    ],
)
def test_bad_fields_are_refused(tmp_path, pattern, message):
    with pytest.raises(ValueError, match=message):
        LlamaConfig(**SIZES, longstride_pattern=pattern)
    config = LlamaConfig(**SIZES)
    with pytest.raises(ValueError, match=message):
        config.longstride_pattern = pattern
    config.save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "longstride_pattern": pattern}))
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(tmp_path)


@pytest.mark.parametrize("layers", [1, 3])
def test_another_number_of_layers_is_refused(tmp_path, layers):
    model = make()
    set_attention_pattern(model, ["local(3)", "column(3)"])
    model.save_pretrained(tmp_path)
    message = f"longstride_pattern must be one for all layers or a list with one for each of {layers}, got 2 entries"
    with pytest.raises(ValueError, match=message):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=layers)


def test_models_with_an_indexer_are_refused():
    with pytest.raises(ValueError, match="'glm_moe_dsa' chooses the keys of each query itself, by index_topk = 2048, which"):
        GlmMoeDsaConfig(longstride_pattern="local(3)")


def test_models_without_full_attention_are_refused():
    message = "has no layers of full attention, only linear_attention and sliding_attention, so longstride_pattern has no"
    config = RecurrentGemmaConfig(num_hidden_layers=6)
    if "sliding_attention" not in getattr(config, "layer_types", ()):
        pytest.skip("this version of transformers does not tell the windows of Recurrent Gemma")
    with pytest.raises(ValueError, match=message):
        config.longstride_pattern = "local(3)"


def test_a_list_may_have_none_for_layers_without_attention():
    config = Qwen3NextConfig(num_hidden_layers=2, layer_types=["linear_attention", "full_attention"])
    for first in (None, "Local(5)"):
        config.longstride_pattern = [first, "local(3)"]
        assert config.longstride_pattern == [first, "Local(3)"]
    with pytest.raises(ValueError, match=r"longstride_pattern\[1\] must be a Pattern or its text, got None"):
        config.longstride_pattern = [None, None]


def test_the_field_is_taken_away_by_none(tmp_path):
    model = make()
    model.config.longstride_pattern = None
    model.save_pretrained(tmp_path)
    assert not {"longstride_pattern", "attn_implementation"} & json.loads((tmp_path / "config.json").read_text()).keys()
    assert AutoModelForCausalLM.from_pretrained(tmp_path).config._attn_implementation == "sdpa"
