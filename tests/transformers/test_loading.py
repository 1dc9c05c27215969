"""Arguments of from_pretrained and save_pretrained of LongstrideForCausalLM."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from longstride.model import SparseTransformer
from longstride.transformers import LongstrideForCausalLM
from tests.transformers.small import tokens, wrapped

LOADS = [LongstrideForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained]


def tiny():
    return wrapped(layers=1, pattern="interleave(local(4))")


@pytest.mark.parametrize("load", LOADS)
def test_fields_go_to_the_configs(tmp_path, load):
    tiny().save_pretrained(tmp_path)
    model = load(tmp_path, pad_token_id=7, use_cache=False, problem_type="regression")
    assert (model.generation_config.pad_token_id, model.generation_config.use_cache) == (7, False)
    assert model.config.problem_type == "regression"
    (tmp_path / "generation_config.json").unlink()
    assert load(tmp_path, pad_token_id=7).generation_config.pad_token_id == 7


@pytest.mark.parametrize("load", LOADS)
def test_unknown_fields_are_named(tmp_path, load):
    tiny().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match="from_pretrained has no argument 'pad_tokn_id', nor has the config; leave it out"):
        load(tmp_path, pad_tokn_id=7)
    for name in ("layers", "hidden_size", "model"):
        with pytest.raises(ValueError, match=f"{name} cannot be changed, only dropout, precision, recompute, chunk"):
            load(tmp_path, **{name: 3})


@pytest.mark.parametrize("name", ["output_attentions", "output_hidden_states"])
def test_other_results_that_a_config_asks_for_are_refused(tmp_path, name):
    tiny().save_pretrained(tmp_path)
    model = LongstrideForCausalLM.from_pretrained(tmp_path, **{name: True})
    with pytest.raises(ValueError, match=f"{name} = True is not supported; leave it out"):
        model(tokens())


def test_a_config_may_ask_for_tuples(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path)
    (logits,) = LongstrideForCausalLM.from_pretrained(tmp_path, return_dict=False)(tokens())
    assert torch.equal(logits, model(tokens()).logits)


@pytest.mark.parametrize("load", LOADS)
def test_a_subfolder_is_read(tmp_path, load):
    """Its weights, config and generation config, and not those of the folder itself."""
    model = tiny()
    model.generation_config.pad_token_id = 7
    model.save_pretrained(tmp_path / "sub")
    wrapped().save_pretrained(tmp_path)
    for given in ({}, {"config": AutoConfig.from_pretrained(tmp_path / "sub")}):
        again = load(tmp_path, subfolder="sub", **given)
        assert torch.equal(again(tokens()).logits, model(tokens()).logits)
        assert again.generation_config.pad_token_id == 7


def test_a_subfolder_that_is_not_there_is_named(tmp_path):
    with pytest.raises(ValueError, match=r"/other is no run and no saved model: there is no such folder"):
        LongstrideForCausalLM.from_pretrained(tmp_path, subfolder="other")


@pytest.mark.parametrize("damage", [lambda content: b"x" * len(content), lambda content: content[:-100]])
def test_damaged_weights_are_refused(tmp_path, damage):
    tiny().save_pretrained(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(damage(path.read_bytes()))
    with pytest.raises(ValueError, match=f"{tmp_path}: the weights cannot be read: "):
        LongstrideForCausalLM.from_pretrained(tmp_path)


def test_shards_are_named(tmp_path):
    model = tiny()
    model.save_pretrained(tmp_path, max_shard_size="5KB")
    with pytest.raises(ValueError, match=r"in shards, by model\.safetensors\.index\.json; .* larger max_shard_size"):
        SparseTransformer.from_pretrained(tmp_path)
    assert torch.equal(LongstrideForCausalLM.from_pretrained(tmp_path)(tokens()).logits, model(tokens()).logits)


def test_other_processes_write_nothing(tmp_path):
    tiny().save_pretrained(tmp_path, is_main_process=False)
    assert not list(tmp_path.iterdir())


def test_a_file_in_the_place_of_the_folder_is_named(tmp_path):
    path = tmp_path / "model"
    path.write_text("")
    with pytest.raises(ValueError, match=f"save_directory = {path} is a file; give a folder"):
        tiny().save_pretrained(path)


@pytest.mark.parametrize(
    "replace",
    [
        lambda model, output: setattr(model.network, "output", output),
        lambda model, output: model.add_module("output", output),
        lambda model, output: model._modules.update(output=output),
    ],
)
def test_parts_that_are_replaced_at_one_place_alone_are_refused(tmp_path, replace):
    model = tiny()
    replace(model, torch.nn.Linear(16, 256, bias=False))
    for call in (
        lambda: model(tokens()),
        lambda: model.save_pretrained(tmp_path),
        lambda: model.generate(tokens(), max_new_tokens=1),
    ):
        with pytest.raises(
            ValueError, match=r"model\.output and model\.network\.output are not the same.*by model\.output = "
        ):
            call()
    assert not list(tmp_path.iterdir())
