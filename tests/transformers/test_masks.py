"""Masks of transformers' models: sliding windows, packed sequences, cross-attention, and torch.compile without a mask."""

from itertools import pairwise

import pytest
import torch
import transformers
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    Cohere2Config,
    DogeConfig,
    DynamicCache,
    Gemma2Config,
    Gemma3TextConfig,
    GptOssConfig,
    Llama4TextConfig,
    MistralConfig,
    MllamaForCausalLM,
    Qwen2MoeConfig,
    VaultGemmaConfig,
)
from transformers.masking_utils import and_masks, causal_mask_function, sdpa_mask, sliding_window_causal_mask_function
from transformers.models.mllama.configuration_mllama import MllamaTextConfig

from longstride.patterns.notation import parse
from longstride.transformers import attention, set_attention_pattern
from longstride.transformers.masks import longstride_mask, read_mask
from tests.transformers.test_attention import HEADS, SIZES, make, recomputed, run, tokens

WINDOW = 8
KINDS = ["sliding_attention", "full_attention"]
EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 16, "shared_expert_intermediate_size": 16}
WINDOWED = {
    "gemma3": lambda: Gemma3TextConfig(**SIZES, layer_types=KINDS, sliding_window=WINDOW, query_pre_attn_scalar=8),
    "cohere2": lambda: Cohere2Config(**SIZES, layer_types=KINDS, sliding_window=WINDOW, pad_token_id=0, bos_token_id=1),
    "qwen2_moe": lambda: Qwen2MoeConfig(
        **{**SIZES, **EXPERTS}, num_experts=4, layer_types=KINDS, use_sliding_window=True, sliding_window=WINDOW
    ),
}


def windowed(name="gemma3", pattern="local(3) | column(6)"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(WINDOWED[name]()).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.1)
    if pattern is not None:
        set_attention_pattern(model, pattern)
    return model


def masked_attention(module, q, k, v, mask, scaling=None, **_):
    """The definition: the model's own mask, and in full layers that of the pattern, too."""
    n = k.shape[2]
    seen = mask[..., :n]
    if module.config.layer_types[module.layer_idx] == "full_attention":
        seen = seen & parse(module.config.longstride_pattern)[0].mask(n)[n - q.shape[2] :]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (q @ k.mT * scaling).masked_fill(~seen, -torch.inf).softmax(-1)
    return (weights @ v).transpose(1, 2), None


AttentionInterface.register("windows_for_tests", masked_attention)
AttentionMaskInterface.register("windows_for_tests", lambda **given: sdpa_mask(**{**given, "allow_is_causal_skip": False}))


@pytest.mark.parametrize("name", WINDOWED)
def test_layers_with_a_window_keep_it_and_the_others_have_the_pattern(name):
    model = windowed(name).double()
    model.set_experts_implementation("eager")  # The default has no float64.
    results = []
    for implementation in ("longstride", "windows_for_tests"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        found = model(tokens(), labels=tokens())
        found.loss.backward()
        results.append([found.logits, *(x.grad for x in model.parameters() if x.grad is not None)])
    assert len(results[0]) == len(results[1])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", WINDOWED)
def test_windows_generate_what_recomputation_does(name):
    """Past the window, where the cache drops keys; also after padding, and with a cache that keeps all keys."""
    model, rows = windowed(name), [tokens(1, 20), tokens(1, 13)]
    given, mask = torch.zeros(2, 20, dtype=torch.long), torch.ones(2, 20, dtype=torch.long)
    given[0], given[1, 7:], mask[1, :7] = rows[0][0], rows[1][0], 0
    settings = {"max_new_tokens": 11, "do_sample": False, "pad_token_id": 0}
    found = model.generate(given, attention_mask=mask, **settings)
    for row, alone, start in zip(found, rows, (0, 7)):
        assert torch.equal(row[start:], recomputed(model, alone, 11)[0])
    ones = torch.ones_like(rows[0])
    assert torch.equal(
        model.generate(rows[0], attention_mask=ones, past_key_values=DynamicCache(), **settings),
        recomputed(model, rows[0], 11),
    )


@pytest.mark.skipif(transformers.__version__.startswith("5.17."), reason="5.17 gives that cache a mask of another length")
def test_the_first_layers_alone_may_assist():
    """transformers then makes the mask of the full layers, too, which none reads, for a cache without them."""
    model, given = windowed(), tokens(1, 20)
    settings = {"attention_mask": torch.ones_like(given), "max_new_tokens": 11, "do_sample": False}
    found = model.generate(given, assistant_early_exit=1, **settings)
    assert torch.equal(found, recomputed(model, given, 11))


def test_a_list_has_none_for_layers_with_a_window():
    model = windowed()
    expected = model(tokens()).logits
    set_attention_pattern(model, [None, "local(3) | column(6)"])
    assert torch.equal(model(tokens()).logits, expected)
    with pytest.raises(ValueError, match=r"pattern\[0\] = 'local\(7\)' is for a layer with a sliding window.*; give None"):
        set_attention_pattern(model, ["local(7)", "local(3)"])
    with pytest.raises(ValueError, match=r"pattern\[1\] must be a Pattern or its text, got None"):
        set_attention_pattern(model, [None, None])


def test_windows_that_the_config_does_not_tell_are_found_in_the_mask():
    model = windowed()
    model.config.__dict__["longstride_pattern"] = ["Local(3)", None]
    with pytest.raises(
        ValueError, match=r"\[0\] = 'Local\(3\)' is for a layer that has a sliding window of 8 keys; give None"
    ):
        model(tokens())
    model.config.__dict__["longstride_pattern"] = [None, None]
    with pytest.raises(ValueError, match=r"\[1\] = None is for a layer that has no sliding window; give its pattern"):
        model(tokens())


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (lambda: MistralConfig(**SIZES, sliding_window=8), "all layers keep their sliding window, of 8 keys.*to None"),
        (lambda: Gemma2Config(**SIZES), r"softcap = 50\.0 is not computed; turn it off in the model's config"),
        (lambda: VaultGemmaConfig(**SIZES), r"softcap = 50\.0 is not computed"),
        (lambda: GptOssConfig(**SIZES, num_local_experts=2), "s_aux = a tensor is not computed"),
        (lambda: Llama4TextConfig(**SIZES, intermediate_size_mlp=40, num_local_experts=2), "no chunks, no other mask"),
        (lambda: DogeConfig(**SIZES), "'doge' chooses the keys of each query itself, by keep_window_size = 2048"),
    ],
)
def test_what_attend_does_not_compute_is_refused(config, message):
    with pytest.raises(ValueError, match=message):
        run(config())


def test_gemma_without_softcapping_works():
    config = Gemma2Config(**SIZES, attn_logit_softcapping=None, layer_types=KINDS, sliding_window=WINDOW)
    model = AutoModelForCausalLM.from_config(config).eval()
    expected = model(tokens()).logits
    set_attention_pattern(model, "dense")
    torch.testing.assert_close(model(tokens()).logits, expected)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="this version has no Gemma 4")
def test_layers_that_share_keys_have_the_last_queries_alone():
    """Gemma 4 drops queries there, of the mask, too: all but those whose logits are asked for, as generate() does."""
    per_layer = {"vocab_size_per_layer_input": SIZES["vocab_size"], "hidden_size_per_layer_input": 8}
    config = transformers.Gemma4TextConfig(
        **{**SIZES, **per_layer, "num_hidden_layers": 4}, layer_types=KINDS * 2, sliding_window=WINDOW, global_head_dim=8,
        num_kv_shared_layers=2, pad_token_id=0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config).eval()
    set_attention_pattern(model, "local(3) | column(6)")
    given, logits = tokens(), model(tokens()).logits
    torch.testing.assert_close(model(given, logits_to_keep=3).logits, logits[:, -3:])
    model.set_attn_implementation("windows_for_tests")
    whole = torch.arange(given.shape[1])  # A tensor, with which no queries are dropped.
    torch.testing.assert_close(logits, model(given, logits_to_keep=whole).logits)
    model.set_attn_implementation("longstride")
    settings = {"attention_mask": torch.ones_like(given), "max_new_tokens": 11, "do_sample": False}
    assert torch.equal(model.generate(given, **settings), recomputed(model, given, 11))


def test_packed_sequences_do_not_see_each_other():
    """transformers tells them by position_ids, without a mask and a cache; patterns count from a sequence's start."""
    model = make(pattern="fixed(4, 1), local(5) | column(3), dense()")
    starts, given = [0, 6, 17, 29], tokens(1)
    positions = torch.cat([torch.arange(b - a) for a, b in pairwise(starts)])[None]
    found = model(given, position_ids=positions, use_cache=False).logits
    for a, b in pairwise(starts):
        torch.testing.assert_close(found[:, a:b], model(given[:, a:b]).logits)


@pytest.mark.parametrize("packed", [False, True])
def test_compiled_training_needs_no_mask(packed):
    model, given = make(), tokens(1)
    positions = torch.arange(29)[None] % (10 if packed else 29)
    gradients = []
    for call in (model, torch.compile(model, backend="aot_eager")):
        model.zero_grad()
        call(given, labels=given, position_ids=positions, use_cache=False).loss.backward()
        gradients.append([x.grad for x in model.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


def test_a_whole_graph_without_a_mask_is_refused_by_name():
    compiled = torch.compile(make(), backend="eager", fullgraph=True)
    with pytest.raises(Exception, match="fullgraph=True needs attention_mask, as ones"):
        compiled(tokens(), use_cache=False)


def test_cross_attention_of_mllama_is_refused():
    config = MllamaTextConfig(**SIZES, cross_attention_layers=[1], dropout=0.0, pad_token_id=0)
    model = MllamaForCausalLM(config)
    set_attention_pattern(model, "local(5)")
    model(tokens())  # There, layers with cross-attention are skipped.
    with pytest.raises(ValueError, match="MllamaTextCrossAttention is not causal self-attention"):
        model(tokens(), cross_attention_states=torch.zeros(2, 40, 32))


class Attention(torch.nn.Module):
    def __init__(self, **given):
        super().__init__()
        self.config = make().config
        self.__dict__.update(given)


class CrossAttention(Attention):
    pass


@pytest.mark.parametrize(
    "module",
    [
        Attention(), Attention(is_causal=False), Attention(is_causal=True, is_cross_attention=True),
        CrossAttention(is_causal=True),
    ],
)  # fmt: skip
def test_modules_that_are_not_causal_self_attention_are_refused(module):
    x = torch.zeros(1, HEADS, 3, 8)
    with pytest.raises(ValueError, match="is not causal self-attention"):
        attention.longstride_attention(module, x, x, x, longstride_mask(1, 3, 3))


def test_keys_without_their_mask_are_refused():
    module, x = Attention(is_causal=True), torch.zeros(1, HEADS, 3, 8)
    attention.longstride_attention(module, x, x, x, longstride_mask(1, 3, 3))
    with pytest.raises(ValueError, match="a layer has no mask, as in cross-attention"):
        attention.longstride_attention(module, x, x, x, None)
    with pytest.raises(ValueError, match="3 keys and a mask for 5, so they are those of another sequence"):
        attention.longstride_attention(module, x, x, x, longstride_mask(1, 5, 5))
    with pytest.raises(ValueError, match="sliding_window = 2 is not in the layer's mask"):
        attention.longstride_attention(module, x, x, x, longstride_mask(1, 3, 3), sliding_window=2)


def test_masks_are_read_back():
    window = sliding_window_causal_mask_function(4)
    assert read_mask(longstride_mask(2, 3, 3), 3) == (None, None)
    assert read_mask(longstride_mask(2, 3, 3, mask_function=window), 3) == (None, 4)
    padding = torch.tensor([[1, 1, 1], [0, 1, 1]])
    documents, found = read_mask(longstride_mask(2, 3, 3, mask_function=window, attention_mask=padding), 3)
    assert (documents.tolist(), found) == ([[1, 1, 1], [0, 1, 1]], 4)


@pytest.mark.parametrize(
    "function", [lambda *_: True, and_masks(causal_mask_function, lambda *_: True), torch.nn.Identity()]
)
def test_unknown_mask_functions_are_refused(function):
    with pytest.raises(
        ValueError, match="only causal masks with padding, packed sequences and sliding windows are computed"
    ):
        longstride_mask(1, 3, 3, mask_function=function)
