"""attn_implementation="longstride" in tiny random models, against plain attention with the mask of the pattern."""

import pytest
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    GPT2Config,
    LlamaConfig,
    Qwen3Config,
    StaticCache,
)

from longstride import Column, Local
from longstride.patterns.notation import parse
from longstride.transformers import ByteTokenizer, attention, masks, set_attention_pattern
from tests.transformers.small import CHECKPOINTING, wrapped

WORDS, LAYERS, HEADS = 53, 2, 4
SIZES = {
    "vocab_size": WORDS, "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": LAYERS, "head_dim": 8,
    "num_attention_heads": HEADS, "num_key_value_heads": 2, "max_position_embeddings": 64, "eos_token_id": None,
}  # fmt: skip
CONFIGS = {
    "gpt2": lambda: GPT2Config(
        vocab_size=WORDS, n_embd=32, n_layer=LAYERS, n_head=HEADS, n_positions=64, attn_pdrop=0.0, eos_token_id=None,
        scale_attn_by_inverse_layer_idx=True, bos_token_id=None,
    ),
    "llama": lambda: LlamaConfig(**SIZES),
    "qwen3": lambda: Qwen3Config(**SIZES),
}  # fmt: skip
PATTERNS = {
    "one": "local(5) | column(7)",
    "heads": "local(5), column(7), block(4), dense()",
    "layers": ["local(3)", "fixed(8, 2) , dense, local(2)"],
}


def make(name="llama", pattern="local(5) | column(7)"):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(CONFIGS[name]()).eval()
    for parameter in model.parameters():  # Larger than initial ones, so that attention is not about uniform.
        parameter.data.add_(torch.randn_like(parameter), alpha=0.2)
    set_attention_pattern(model, pattern)
    return model


def tokens(batch=2, n=29):
    return torch.randint(WORDS, (batch, n), generator=torch.Generator().manual_seed(1))


def masked_attention(module, q, k, v, mask, scaling=None, **_):
    """The definition, by the mask of the layer's pattern; a query that sees no key gets 0."""
    chosen = module.config.longstride_pattern
    heads = parse(chosen if isinstance(chosen, str) else chosen[module.layer_idx])
    n = k.shape[2]
    seen = torch.stack([head.mask(n) for head in heads])[None, :, n - q.shape[2] :]
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    weights = (q @ k.mT * scaling).masked_fill(~seen, -torch.inf).softmax(-1).nan_to_num(0.0)
    return (weights @ v).transpose(1, 2), None


AttentionInterface.register("masked_for_tests", masked_attention)
AttentionMaskInterface.register("masked_for_tests", lambda **_: None)


def recomputed(model, given, count, **others):
    for _ in range(count):
        given = torch.cat([given, model(given, use_cache=False, **others).logits[:, -1:].argmax(-1)], 1)
    return given


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", CONFIGS)
def test_results_and_gradients_are_those_of_the_mask(name, pattern):
    model = make(name, PATTERNS[pattern]).double()
    results = []
    for implementation in ("longstride", "masked_for_tests"):
        model.set_attn_implementation(implementation)
        model.zero_grad()
        found = model(tokens(), labels=tokens())
        found.loss.backward()
        results.append([found.logits, *(x.grad for x in model.parameters())])
    for ours, theirs in zip(*results):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("name", CONFIGS)
def test_results_are_those_of_eager_attention(name):
    model, n = make(name), tokens().shape[1]
    ours = model(tokens()).logits
    seen = parse(PATTERNS["one"])[0].mask(n)
    bias = torch.zeros(n, n).masked_fill(~seen, torch.finfo(torch.float32).min).expand(2, 1, n, n)
    model.set_attn_implementation("eager")
    torch.testing.assert_close(ours, model(tokens(), attention_mask=bias).logits)


@pytest.mark.parametrize("pattern", PATTERNS)
@pytest.mark.parametrize("name", CONFIGS)
def test_generation_is_that_of_recomputation(name, pattern):
    model = make(name, PATTERNS[pattern])
    found = model.generate(tokens(), attention_mask=torch.ones_like(tokens()), max_new_tokens=14, do_sample=False)
    assert torch.equal(found, recomputed(model, tokens(), 14))


def test_beams_keep_their_keys():
    model, given = make(), tokens(1, 12)
    settings = {"attention_mask": torch.ones_like(given), "num_beams": 3, "max_new_tokens": 8, "do_sample": False}
    assert torch.equal(model.generate(given, **settings), model.generate(given, use_cache=False, **settings))


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_on_the_left_changes_nothing(name):
    """Also with patterns that count from the start of the text."""
    model, rows = make(name, "fixed(8, 2), local(5) | column(7), dense()"), [tokens(1, 20), tokens(1, 13)]
    given, mask = torch.zeros(2, 20, dtype=torch.long), torch.ones(2, 20, dtype=torch.long)
    given[0], given[1, 7:], mask[1, :7] = rows[0][0], rows[1][0], 0
    found = model.generate(given, attention_mask=mask, max_new_tokens=11, do_sample=False, pad_token_id=0)
    for row, alone, start in zip(found, rows, (0, 7)):
        assert torch.equal(row[start:], recomputed(model, alone, 11)[0])


@pytest.mark.parametrize("name", CONFIGS)
def test_assisted_generation_is_that_of_greedy_search(name):
    """Guesses are several queries at once, and wrong ones leave the cache."""
    model, given = make(name), tokens(1, 12).repeat(1, 2)
    settings = {"attention_mask": torch.ones_like(given), "max_new_tokens": 14, "do_sample": False}
    expected = model.generate(given, **settings)
    assert torch.equal(model.generate(given, **settings, prompt_lookup_num_tokens=3), expected)
    assert torch.equal(model.generate(given, **settings, assistant_model=make(name, "local(2)")), expected)


@pytest.mark.parametrize("name", CONFIGS)
def test_padding_on_the_left_in_one_call(name):
    """GPT-2 knows positions by position_ids alone, which generate() gives."""
    model, mask = make(name), torch.ones(2, 29, dtype=torch.long)
    mask[1, :9] = 0
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    found = model(tokens(), attention_mask=mask, position_ids=positions).logits
    torch.testing.assert_close(found[1:, 9:], model(tokens()[1:, 9:]).logits)


def test_padding_on_the_right_is_not_seen():
    model, mask = make(), torch.ones(2, 29, dtype=torch.long)
    mask[1, 20:] = 0
    found = model(tokens(), attention_mask=mask).logits
    torch.testing.assert_close(found[1:, :20], model(tokens()[1:, :20]).logits)
    torch.testing.assert_close(found[0], model(tokens()).logits[0])


def test_padding_between_tokens_is_refused():
    mask = torch.ones(2, 29, dtype=torch.long)
    mask[1, 20] = 0
    with pytest.raises(ValueError, match="padding between tokens"):
        make()(tokens(), attention_mask=mask)


def test_patterns_are_given_as_objects_too():
    model = make()
    expected = model(tokens()).logits
    set_attention_pattern(model, [Local(5) | Column(7)] * LAYERS)
    assert torch.equal(model(tokens()).logits, expected)


def test_models_have_it_as_a_method():
    model = make()
    model.set_attention_pattern("local(3)")
    assert model.config.longstride_pattern == "Local(3)"


@pytest.mark.parametrize("name", CONFIGS)
def test_checkpointing_changes_nothing(name):
    model = make(name).train()
    gradients = []
    for enabled in (False, True):
        if enabled:
            getattr(model, f"{CHECKPOINTING}_enable")()
        model.zero_grad()
        torch.manual_seed(3)  # GPT-2 drops activations.
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([x.grad for x in model.parameters()])
    for one, other in zip(*gradients):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("locl(3)", "there is no pattern"),
        ("local(3), local(2)", "has 2 patterns for 4 heads; give 1 or 4"),
        (["local(3)"], "a list with one for each of 2, got 1 entries"),
        (["local(3)", 7], r"pattern\[1\] must be a Pattern or its text, got 7"),
        (7, "pattern must be one for all layers or a list"),
    ],
)
def test_bad_patterns_are_refused(pattern, message):
    with pytest.raises(ValueError, match=message):
        set_attention_pattern(make(), pattern)


def test_generation_takes_stop_strings():
    model, given = make(), tokens(1, 12)
    ones = torch.ones_like(given)
    whole = model.generate(given, attention_mask=ones, max_new_tokens=8, do_sample=False)
    stops = ByteTokenizer().decode(whole[0, 14:15])
    found = model.generate(
        given, attention_mask=ones, max_new_tokens=8, do_sample=False, stop_strings=[stops], tokenizer=ByteTokenizer()
    )
    assert len(found[0]) <= 15
    assert torch.equal(found[0], whole[0, : len(found[0])])


def test_our_own_models_are_refused():
    with pytest.raises(ValueError, match="LongstrideForCausalLM has its own pattern; give it as `pattern` in its config"):
        set_attention_pattern(wrapped(), "local(3)")


def test_what_is_no_model_is_refused():
    with pytest.raises(ValueError, match="must be a model of transformers, got Linear"):
        set_attention_pattern(torch.nn.Linear(2, 2), "local(3)")


def test_a_model_without_a_pattern_is_refused():
    model = AutoModelForCausalLM.from_config(CONFIGS["llama"](), attn_implementation="longstride")
    with pytest.raises(ValueError, match=r"no longstride_pattern; call set_attention_pattern\(model, pattern\)"):
        model(tokens())


def run(config, training=False, **given):
    model = AutoModelForCausalLM.from_config(config).train(training)
    set_attention_pattern(model, "local(5)")
    return model(**{"input_ids": tokens(), **given})


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: run(LlamaConfig(**SIZES, attention_dropout=0.5), True), r"dropout = 0\.5 is not computed; set the"),
        (lambda: run(CONFIGS["llama"](), attention_mask=torch.zeros(2, 1, 29, 29)), r"float32 \[2, 1, 29, 29\] is not"),
        (lambda: run(CONFIGS["llama"](), output_attentions=True), "output_attentions = True is not computed"),
        (
            lambda: run(CONFIGS["llama"](), past_key_values=StaticCache(config=CONFIGS["llama"](), max_cache_len=40)),
            "use the default DynamicCache",
        ),
        (lambda: run(with_cross_attention(), encoder_hidden_states=torch.zeros(2, 3, 32)), "no cross-attention"),
    ],
)
def test_what_attend_does_not_compute_is_refused(call, message):
    with pytest.raises(ValueError, match=message):
        call()


def with_cross_attention():
    config = CONFIGS["gpt2"]()
    config.add_cross_attention = True
    return config


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"softcap": 50.0}, r"softcap = 50\.0 is not computed; turn it off"),
        ({"s_aux": torch.zeros(HEADS)}, "s_aux = a tensor is not computed; turn it off"),
        ({"position_bias": torch.zeros(1)}, "position_bias = a tensor is not computed"),
        ({"is_causal": False}, "LlamaAttention is not causal self-attention"),
    ],
)
def test_arguments_that_change_the_result_are_refused(given, message):
    module, x, mask = make().model.layers[0].self_attn, torch.zeros(1, HEADS, 3, 8), masks.longstride_mask(1, 3, 3)
    attention.longstride_attention(module, x, x, x, mask, **dict.fromkeys(given))
    with pytest.raises(ValueError, match=message):
        attention.longstride_attention(module, x, x, x, mask, **given)


def test_a_compiled_model_needs_a_mask_without_padding():
    model = make()
    ones = torch.ones_like(tokens())
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(tokens(), attention_mask=ones, use_cache=False).logits, model(tokens()).logits)
    padded = ones.clone()
    padded[0, 0] = 0
    with pytest.raises(RuntimeError, match="must have no padding"):
        compiled(tokens(), attention_mask=padded, use_cache=False)


def test_the_functions_are_registered():
    assert AttentionInterface()["longstride"] is attention.longstride_attention
    assert AttentionMaskInterface()["longstride"] is masks.longstride_mask
