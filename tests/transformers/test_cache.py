"""generate() with our cache, against recomputation and against sampling."""

import copy
from dataclasses import replace

import pytest
import torch
from transformers import AutoModelForCausalLM, DynamicCache, LlamaConfig

from longstride.model import PRESETS, preset
from longstride.sampling import generate
from longstride.transformers import LongstrideCache, LongstrideConfig, LongstrideForCausalLM
from tests.transformers.small import tokens, wrapped
from tests.transformers.test_model import VARIANTS

NEW = 28


def greedy(model, given, count=NEW, **others):
    ones = torch.ones_like(given)
    return model.generate(given, attention_mask=ones, max_new_tokens=count, do_sample=False, **others)


@pytest.mark.parametrize("variant", VARIANTS)
def test_greedy_generation_is_that_of_recomputation(variant):
    model, given = wrapped(**VARIANTS[variant]), tokens()
    found = greedy(model, given)
    for _ in range(NEW):
        given = torch.cat([given, model(given).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, given)
    assert len(found[0, 11:].unique()) > 3  # It does not repeat one byte.


@pytest.mark.parametrize("name", PRESETS)
def test_presets_generate_what_recomputation_does(name):
    """Around the end of a stride; with fewer and narrower blocks, and positions that fit."""
    whole, count = preset(name), 8
    stride = whole.positions.sizes[-1] if len(whole.positions.sizes) == 2 else 128
    changes = {"layers": max(2, len(whole.cycle)), "width": 8 * whole.heads, "dropout": 0.0, "precision": "float32"}
    embedding = whole.embedding if whole.embedding == "rotary" else f"matrix({stride})"
    config = replace(whole, **changes, recompute="off", context=stride + count, embedding=embedding)
    torch.manual_seed(0)
    model = LongstrideForCausalLM(LongstrideConfig.from_network(config)).eval()
    for parameter in model.parameters():
        parameter.data.add_(torch.randn_like(parameter), alpha=0.15)
    given = tokens(1, stride - count // 2)
    found = greedy(model, given, count)
    with torch.no_grad():
        for _ in range(count):
            given = torch.cat([given, model(given).logits[:, -1:].argmax(-1)], 1)
    assert torch.equal(found, given)


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_of_every_step_are_those_of_recomputation(variant):
    model, given = wrapped(**VARIANTS[variant]), tokens(n=39)
    with torch.no_grad():
        expected = model(given).logits
        first = model(given[:, :7], use_cache=True)
        torch.testing.assert_close(first.logits, expected[:, :7])
        for step in range(7, 20):
            next_one = model(given[:, step : step + 1], past_key_values=first.past_key_values)
            torch.testing.assert_close(next_one.logits, expected[:, step : step + 1], rtol=1e-4, atol=1e-4)
        rest = model(given[:, 20:], past_key_values=first.past_key_values)
    torch.testing.assert_close(rest.logits, expected[:, 20:], rtol=1e-4, atol=1e-4)
    assert rest.past_key_values.get_seq_length() == 39


def test_greedy_generation_is_that_of_longstride_sample():
    model, given = wrapped(), tokens()
    pieces = list(generate(model.network, [bytes(row.tolist()) for row in given], NEW, top_k=1))
    for row, found in enumerate(greedy(model, given)):
        assert bytes(found[11:].tolist()) == b"".join(piece[row] for piece in pieces)


@pytest.mark.parametrize("variant", VARIANTS)
def test_beams_keep_their_keys(variant):
    model = wrapped(**VARIANTS[variant])
    with_cache, without = (greedy(model, tokens(), num_beams=4, use_cache=use) for use in (True, False))
    assert torch.equal(with_cache, without)
    assert not torch.equal(with_cache, greedy(model, tokens()))


def test_sampling_draws_the_same_with_and_without_a_cache():
    model, found = wrapped(), []
    for use in (True, False):
        torch.manual_seed(5)
        settings = {"do_sample": True, "top_k": 20, "temperature": 0.8, "max_new_tokens": NEW, "use_cache": use}
        found.append(model.generate(tokens(), attention_mask=torch.ones_like(tokens()), num_return_sequences=2, **settings))
    assert torch.equal(*found)
    assert not torch.equal(found[0][0], found[0][1])


def test_a_compiled_model_generates():
    """Compiled is what computes without a cache."""
    model, given = wrapped(layers=1, pattern="interleave(local(4))"), tokens()
    expected, logits = greedy(model, given, 3), model(given).logits
    model.compile(backend="aot_eager")
    assert torch.equal(greedy(model, given, 3), expected)
    torch.testing.assert_close(model(given).logits, logits)


def test_the_cache_is_smaller_than_one_of_all_keys():
    model = wrapped(pattern="interleave(local(4))")
    cache = model(tokens(), use_cache=True).past_key_values
    assert cache.get_max_length() == 39
    assert cache.decoder.cache.keys[0].shape[2] == 5


def test_a_cache_goes_on_where_it_ended():
    model, given = wrapped(), tokens()
    first = greedy(model, given, 10, return_dict_in_generate=True, past_key_values=LongstrideCache(model.network))
    second = greedy(model, first.sequences, 5, past_key_values=first.past_key_values)
    assert torch.equal(second, greedy(model, given, 15))
    small = greedy(model, given, 10, return_dict_in_generate=True)
    with pytest.raises(ValueError, match=r"room for 20 tokens, got 21.*, or LongstrideCache\(model.network\) as past_key_v"):
        greedy(model, small.sequences, 5, past_key_values=small.past_key_values)


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("variant", ["paper", "modern"])
def test_copies_of_a_cache_go_on_from_one_prompt(variant, precision):
    model, given = wrapped(precision=precision, **VARIANTS[variant]), tokens()
    cache = model(given, use_cache=True).past_key_values
    twin = copy.deepcopy(cache)
    assert twin.network is model.network
    others = tokens(2, 9, seed=4), tokens(2, 9, seed=5)
    for _ in range(2):  # The second time both go on from what they have.
        for own, more in zip((cache, twin), others):
            found = model(more, past_key_values=own).logits
            given_before = own.get_seq_length() - 9
            whole = torch.cat([given, more] if given_before == 11 else [given, more, more], 1)
            fresh = LongstrideCache(model.network)
            model(whole[:, :11], past_key_values=fresh)
            assert torch.equal(found, model(whole[:, 11:], past_key_values=fresh).logits[:, -9:])
    assert copy.deepcopy(LongstrideCache(model.network)).get_seq_length() == 0


@pytest.mark.parametrize("n", [6, 11])
def test_a_cache_of_more_tokens_than_are_given_is_refused(n):
    """transformers takes the tokens that are not in the cache from the end, and would give some of them twice."""
    model, given = wrapped(layers=1, pattern="interleave(local(4))"), tokens()
    cache = model(given, use_cache=True).past_key_values
    with pytest.raises(ValueError, match=r"past_key_values has 11 tokens; give generate.* with at least one token more"):
        greedy(model, given[:, :n], 3, past_key_values=cache)


def test_generation_ends_with_the_context():
    model = wrapped()
    assert greedy(model, tokens(), 29).shape == (2, 40)
    with pytest.raises(ValueError, match="there is room for 39 tokens, got 40"):
        greedy(model, tokens(), 30)


def test_caches_of_others_are_refused():
    model = wrapped()
    with pytest.raises(ValueError, match="past_key_values must be a LongstrideCache, got DynamicCache; leave it out"):
        model(tokens(), past_key_values=DynamicCache())
    with pytest.raises(ValueError, match="past_key_values must be a LongstrideCache, got tuple; leave it out"):
        greedy(model, tokens(), past_key_values=())
    with pytest.raises(ValueError, match="cache_implementation = 'static' is not supported; leave it out"):
        greedy(model, tokens(), cache_implementation="static")
    cache = model(tokens(), use_cache=True).past_key_values
    with pytest.raises(ValueError, match="past_key_values is the cache of another model; make one with LongstrideCache"):
        wrapped()(tokens(2, 1), past_key_values=cache)
    with pytest.raises(ValueError, match="bytes must be 0 to 255, got 300 to 300"):
        model(torch.full((2, 1), 300), past_key_values=cache)
    with pytest.raises(ValueError, match=r"attention_mask must be \[2, 12\], with the tokens in the cache, got \[2, 1\]"):
        model(tokens(2, 1), past_key_values=cache, attention_mask=torch.ones(2, 1))
    with pytest.raises(ValueError, match="input_ids has 3 rows, and the cache 2; make a new cache"):
        model(tokens(3, 1), past_key_values=cache)
    with pytest.raises(NotImplementedError, match=r"crop\(2\) is not possible"):
        cache.crop(2)
    sizes = {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
    other = AutoModelForCausalLM.from_config(LlamaConfig(vocab_size=256, **sizes))
    with pytest.raises(NotImplementedError, match="it is for LongstrideForCausalLM alone"):
        other(tokens(), past_key_values=LongstrideCache(model.network))


def test_bad_arguments_of_a_cache_are_refused():
    model = wrapped(layers=1, pattern="interleave(local(4))")
    for network in (5, model):
        with pytest.raises(
            ValueError, match=f"network must be a SparseTransformer, got {type(network).__name__}; give model.n"
        ):
            LongstrideCache(network)
    with pytest.raises(ValueError, match="tokens must be a whole number of at least 1, got 'a'"):
        LongstrideCache(model.network, "a")
    with pytest.raises(ValueError, match="tokens must be at least 1, got -3"):
        LongstrideCache(model.network, -3)
    with pytest.raises(ValueError, match="input_ids has no rows; give at least one"):
        model(tokens(2)[:0], use_cache=True)
    cache = model(tokens(2), use_cache=True).past_key_values
    for rows, got in ((torch.tensor([0]), r"\[1\]"), ([0, 1], r"\[0, 1\]")):
        with pytest.raises(ValueError, match=f"beam_idx must be a tensor of the 2 rows to go on from, got {got}"):
            cache.reorder_cache(rows)


def test_hooks_run_without_a_cache():
    """A cache reads the weights alone."""
    model, given = wrapped(layers=1, pattern="interleave(local(4))"), tokens(1)
    before = greedy(model, given, 3)
    model.blocks[0].register_forward_hook(lambda _, __, h: h.flip(-1))
    with pytest.raises(ValueError, match=r"blocks\.0 has hooks.*or give generate\(\) use_cache=False"):
        greedy(model, given, 3)
    assert not torch.equal(greedy(model, given, 3, use_cache=False), before)


@pytest.mark.parametrize("given", [{"prompt_lookup_num_tokens": 2}, {"assistant_model": wrapped()}])
def test_assisted_generation_is_refused(given):
    """From the start, and not when the first guess is wrong."""
    with pytest.raises(ValueError, match="assisted generation and prompt lookup are not supported"):
        greedy(wrapped(), tokens(1), **given)


def test_generate_batch_is_refused():
    with pytest.raises(NotImplementedError, match="continuous batching and generate_batch are not supported"):
        wrapped().generate_batch([[1, 2, 3]])
