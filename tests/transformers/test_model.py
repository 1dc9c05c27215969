"""LongstrideForCausalLM against the SparseTransformer that it is made of."""

import copy
import json
import pickle
import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM, Trainer, TrainingArguments, default_data_collator

from longstride.data import samples
from longstride.model import SparseTransformer
from longstride.training import train
from longstride.transformers import LongstrideConfig, LongstrideForCausalLM
from tests.training.small import config as run_config
from tests.transformers.small import CHECKPOINTING, network, tokens, wrapped

VARIANTS = {
    "paper": {},
    "modern": {"norm": "rms", "qk_norm": True, "last_bytes": 3, "embedding": "rotary", "init": "modern"},
    "fixed": {"pattern": "distinct(merged(fixed(4, 1)))"},
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_logits_predict_the_next_token(variant):
    model = wrapped(**VARIANTS[variant])
    found = model(tokens()).logits
    assert found.shape == (2, 11, 256)
    longer = torch.cat([tokens(), tokens(n=1, seed=2)], 1)
    assert torch.equal(found, model.network(longer)[:, 1:])
    torch.testing.assert_close(found[:, :-1], model.network(tokens())[:, 1:])


def test_the_loss_is_the_mean_of_the_shifted_labels():
    model, labels = wrapped(), tokens().clone()
    labels[0, 5:] = -100
    nats = model.network.nats(tokens())
    scored = torch.cat([nats[0, 1:5], nats[1, 1:]])
    torch.testing.assert_close(model(tokens(), labels=labels).loss, scored.mean())
    torch.testing.assert_close(model(tokens(), labels=labels, num_items_in_batch=7).loss, scored.sum() / 7)


@pytest.mark.parametrize("dtype", [torch.uint8, torch.int16])
def test_labels_of_few_bits(dtype):
    model, labels = wrapped(), tokens()
    labels[0, :2] = 156  # -100 as uint8.
    assert torch.equal(model(tokens(), labels=labels.to(dtype)).loss, model(tokens(), labels=labels).loss)


def test_a_whole_context_has_a_loss_and_no_last_logits():
    model, given = wrapped(), tokens(n=40)
    found = model(given, labels=given)
    torch.testing.assert_close(found.loss, model.network.nats(given)[:, 1:].mean())
    assert found.logits[:, -1].isnan().all()
    assert not found.logits[:, :-1].isnan().any()
    found.loss.backward()
    assert all(parameter.grad.isfinite().all() for parameter in model.parameters())
    with pytest.raises(ValueError, match="40 tokens, and the context is 40: give at most 39, or with labels 40"):
        model(given)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_folders_of_longstride_are_read(tmp_path, dtype):
    network().save_pretrained(tmp_path, dtype)
    ours, theirs = SparseTransformer.from_pretrained(tmp_path), LongstrideForCausalLM.from_pretrained(tmp_path)
    assert theirs.network.config == ours.config
    assert list(theirs.state_dict()) == list(ours.state_dict())
    for name, x in ours.state_dict().items():
        assert theirs.state_dict()[name].dtype == torch.float32
        assert torch.equal(theirs.state_dict()[name], x)
    torch.testing.assert_close(theirs(tokens()).logits[:, :-1], ours(tokens())[:, 1:])


def test_longstride_reads_folders_of_transformers(tmp_path):
    model = wrapped()
    model.save_pretrained(tmp_path)
    ours = SparseTransformer.from_pretrained(tmp_path)
    assert ours.config == model.network.config
    assert all(torch.equal(x, model.state_dict()[name]) for name, x in ours.state_dict().items())
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert isinstance(again, LongstrideForCausalLM)
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


def test_a_run_and_its_checkpoints_are_read(tmp_path):
    train(run_config(tmp_path, steps=2))
    for folder in (tmp_path / "run", tmp_path / "run/checkpoints/step-2"):
        ours, theirs = SparseTransformer.from_pretrained(folder), LongstrideForCausalLM.from_pretrained(folder)
        assert theirs.network.config == ours.config
        assert all(torch.equal(x, theirs.state_dict()[name]) for name, x in ours.state_dict().items())


@pytest.mark.parametrize("load", [LongstrideForCausalLM.from_pretrained, AutoModelForCausalLM.from_pretrained])
def test_the_dtype_is_that_of_activations(tmp_path, load):
    wrapped().save_pretrained(tmp_path)
    model = load(tmp_path, dtype=torch.bfloat16, recompute="on")
    assert (model.network.config.precision, model.network.config.recompute) == ("bfloat16", "on")
    assert {parameter.dtype for parameter in model.parameters()} == {torch.float32}
    assert load(tmp_path, dtype="auto").network.config.precision == "float32"
    with pytest.raises(ValueError, match=r"dtype = torch\.int8 is not supported"):
        load(tmp_path, dtype=torch.int8)


def test_weights_that_do_not_fit_are_refused(tmp_path):
    wrapped().save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    content = json.loads(path.read_text())
    path.write_text(json.dumps({**content, "model": {**content["model"], "layers": 4}}))
    with pytest.raises(ValueError, match=r"the weights do not fit .*: missing keys, such as 'blocks"):
        LongstrideForCausalLM.from_pretrained(tmp_path)


def test_the_config_is_that_of_the_network():
    config = wrapped().config
    assert LongstrideConfig.from_dict(config.to_dict()).network == config.network
    assert isinstance(AutoConfig.for_model("longstride", **config.model), LongstrideConfig)
    assert (config.vocab_size, config.hidden_size, config.num_hidden_layers) == (256, 16, 3)
    assert (config.num_attention_heads, config.max_position_embeddings) == (2, 40)
    with pytest.raises(ValueError, match="LongstrideConfig: heads = 3 does not divide width = 16"):
        LongstrideConfig(**{**config.model, "heads": 3})


def test_dropout_follows_the_mode():
    model = wrapped(dropout=0.5)
    assert torch.equal(model(tokens()).logits, model(tokens()).logits)
    model.train()
    assert not torch.equal(model(tokens()).logits, model(tokens()).logits)
    twin = copy.deepcopy(model)
    assert twin.network.blocks is twin.blocks
    assert twin.blocks is not model.blocks


def test_checkpointing_is_our_recomputation():
    model = wrapped().train()
    gradients = []
    enable, disable = (getattr(model, f"{CHECKPOINTING}_{verb}") for verb in ("enable", "disable"))
    for switch in (lambda: None, enable, disable):
        switch()
        model.zero_grad()
        model(tokens(), labels=tokens()).loss.backward()
        gradients.append([parameter.grad for parameter in model.parameters()])
        if switch == enable:
            assert set(model.network.recomputed) == {"on"}
            assert getattr(model, f"is_{CHECKPOINTING}")
            assert all(block.ff.recompute for block in model.blocks)
    assert set(model.network.recomputed) == {"off"}
    for one, *others in zip(*gradients):
        for other in others:
            torch.testing.assert_close(one, other)


def test_forward_compiles():
    model = wrapped()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    ones = torch.ones_like(tokens())
    found = compiled(tokens(), attention_mask=ones, labels=tokens())
    expected = model(tokens(), labels=tokens())
    torch.testing.assert_close(found.logits, expected.logits)
    torch.testing.assert_close(found.loss, expected.loss)


def test_the_trainer_learns_saves_and_resumes(tmp_path):
    text = torch.frombuffer(bytearray(samples.text()[: 40 * 32]), dtype=torch.uint8).long().view(-1, 40)
    rows = [{"input_ids": row, "labels": row} for row in text]

    def fit(out, steps, **others):
        arguments = TrainingArguments(
            str(tmp_path / out), max_steps=steps, per_device_train_batch_size=8, learning_rate=1e-2, logging_steps=1,
            lr_scheduler_type="constant", save_steps=4, report_to=[], disable_tqdm=True, use_cpu=True, seed=3,
            gradient_accumulation_steps=2, **{CHECKPOINTING: True},
        )  # fmt: skip
        trainer = Trainer(wrapped(), arguments, train_dataset=rows, data_collator=default_data_collator)
        trainer.train(**others)
        return trainer

    whole = fit("whole", 8)
    losses = [row["loss"] for row in whole.state.log_history if "loss" in row]
    assert losses[-1] < 0.8 * losses[0]
    fit("parts", 4)
    resumed = fit("parts", 8, resume_from_checkpoint=True)
    for name, x in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], x)
    saved = SparseTransformer.from_pretrained(tmp_path / "whole/checkpoint-8")
    assert all(torch.equal(x, whole.model.state_dict()[name]) for name, x in saved.state_dict().items())
    assert whole.evaluate(rows)["eval_loss"] < losses[0]


def test_the_trainer_smooths_shifted_labels(tmp_path):
    model, given = wrapped(), tokens()
    settings = {"report_to": [], "use_cpu": True, "label_smoothing_factor": 0.1}
    trainer = Trainer(model, TrainingArguments(str(tmp_path), **settings))
    found = trainer.compute_loss(model, {"input_ids": given, "labels": given})
    logits = model(given).logits[:, :-1].flatten(0, 1)
    torch.testing.assert_close(found, F.cross_entropy(logits, given[:, 1:].flatten(), label_smoothing=0.1))


@pytest.mark.parametrize("by_method", [True, False])
def test_a_replaced_output_computes(by_method):
    model, given = wrapped(), tokens()
    calls = [{}, {"use_cache": True}, {"labels": given}]
    before = [model(given, **call).logits for call in calls]
    twice = copy.deepcopy(model.output)
    twice.weight.data *= 2
    if by_method:
        model.set_output_embeddings(twice)
    else:
        model.output = twice
    assert model.network.output is twice is model.get_output_embeddings()
    for call, logits in zip(calls, before):
        torch.testing.assert_close(model(given, **call).logits, 2 * logits)


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_computes_with_its_own_parts(copied):
    model, given = wrapped(), tokens()
    before, made = model(given).logits, copied(model)
    made.output.weight.data *= 2
    torch.testing.assert_close(made(given).logits, 2 * before)
    made.output = model.output
    assert torch.equal(made(given).logits, before)


def test_other_modules_of_a_subclass_are_not_of_the_network():
    class Head(nn.Linear):
        pass

    class Mine(LongstrideForCausalLM):
        def __init__(self, config):
            super().__init__(config)
            self.head = Head(16, 1)

    model = Mine(wrapped().config).eval()
    assert "head.weight" in model.state_dict()
    assert "head.weight" not in model.network.state_dict()
    assert model.generate(tokens(), max_new_tokens=3).shape == (2, 14)


def test_replicas_of_data_parallel_compute_with_their_own_weights(monkeypatch):
    """Trainer has them where it sees several GPUs. Here all are on the CPU, and the weights of the second are 0."""

    def broadcast(given, devices, detach=False):
        return [given, [torch.zeros_like(x) for x in given]]

    monkeypatch.setattr(sys.modules["torch.nn.parallel.replicate"], "_broadcast_coalesced_reshape", broadcast)
    model, given = wrapped(), tokens()
    before = model(given).logits
    first, second = nn.parallel.replicate(model, [0, 1])
    assert torch.equal(first(given).logits, before)
    assert not second(given).logits.any()
    assert torch.equal(model(given).logits, before)


def test_replaced_embeddings_compute():
    model, given = wrapped(), tokens()
    before = model(given).logits
    table = copy.deepcopy(model.get_input_embeddings())
    table.weight.data = table.weight.data.flip(0)
    model.set_input_embeddings(table)
    assert model.network.embedding.token is table
    torch.testing.assert_close(model(255 - given).logits, before)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"input_ids": None}, r"input_ids must be bytes \[batch, n\], got None"),
        ({"input_ids": torch.zeros(3, dtype=torch.long)}, r"must be bytes \[batch, n\], got \[3\]"),
        ({"input_ids": [[1, 2]]}, r"input_ids must be a tensor \[batch, n\], got \[\[1, 2\]\]"),
        ({"attention_mask": [[1]]}, r"attention_mask must be a tensor \[batch, n\], got \[\[1\]\]"),
        ({"labels": [[1]]}, r"labels must be a tensor \[batch, n\], got \[\[1\]\]"),
        ({"logits_to_keep": "x"}, "logits_to_keep must be a whole number of at least 0, got 'x'"),
        ({"logits_to_keep": -1}, "logits_to_keep must be at least 0, got -1"),
        ({"input_ids": torch.full((1, 3), 256)}, "bytes must be 0 to 255, got 0 to 256"),
        ({"attention_mask": torch.tensor([[0, 1, 1], [1, 1, 1]])}, "padding before tokens.*pad on the right"),
        ({"attention_mask": torch.tensor([[1, 0, 1], [1, 1, 1]])}, "padding before tokens"),
        ({"attention_mask": torch.tensor([[1, 1, 0], [1, 1, 1]]), "use_cache": True}, "padding, and a cache keeps every"),
        ({"attention_mask": torch.ones(2, 1, 3, 3)}, r"attention_mask must be \[2, 3\], got \[2, 1, 3, 3\]"),
        ({"attention_mask": torch.ones(1, 3)}, r"attention_mask must be \[2, 3\], got \[1, 3\]"),
        ({"attention_mask": torch.ones(2, 2)}, r"attention_mask must be \[2, 3\], got \[2, 2\]"),
        ({"input_ids": torch.zeros(2, 0, dtype=torch.long)}, "input_ids has no tokens; give at least one byte"),
        ({"labels": torch.zeros(2, 2, dtype=torch.long)}, r"labels must be \[2, 3\], as input_ids, got \[2, 2\]"),
        ({"labels": torch.full((2, 3), 256)}, "labels must be bytes, 0 to 255, or -100, got 256"),
        ({"labels": torch.full((2, 3), -1)}, "labels must be bytes, 0 to 255, or -100, got -1"),
        ({"labels": torch.zeros(2, 3)}, "labels must be whole numbers, got torch.float32"),
        ({"past_key_values": ()}, "past_key_values must be a LongstrideCache, got tuple"),
        ({"labels": torch.zeros(2, 3, dtype=torch.long), "use_cache": True}, "labels and a cache do not go together"),
        ({"inputs_embeds": torch.zeros(2, 3, 16)}, "inputs_embeds = a tensor is not supported; leave it out"),
        ({"output_attentions": True}, "output_attentions = True is not supported"),
    ],
)
def test_bad_arguments_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        wrapped()(**{"input_ids": tokens(n=3), **given})


@pytest.mark.parametrize("use_cache", [False, True])
def test_some_logits_are_kept(use_cache):
    model = wrapped()
    whole = model(tokens()).logits
    kept = torch.tensor([0, 7, 3])
    assert torch.equal(model(tokens(), logits_to_keep=kept, use_cache=use_cache).logits, whole[:, kept])
    assert torch.equal(model(tokens(), logits_to_keep=4, use_cache=use_cache).logits, whole[:, -4:])
    one = torch.tensor([10])
    torch.testing.assert_close(model(tokens(), logits_to_keep=one, use_cache=use_cache).logits, whole[:, one])


def test_there_are_256_tokens():
    model = wrapped()
    for size in (None, 256):
        assert model.resize_token_embeddings(size) is model.get_input_embeddings()
    with pytest.raises(ValueError, match="new_num_tokens = 260 is not possible, since tokens are the 256 bytes"):
        model.resize_token_embeddings(260)


def test_padding_on_the_right_is_not_seen():
    model, mask = wrapped(), torch.ones(2, 11, dtype=torch.long)
    mask[1, 6:] = 0
    found = model(tokens(), attention_mask=mask).logits
    torch.testing.assert_close(found[1:, :6], model(tokens()[1:, :6]).logits)


def test_generation_does_not_go_on_from_padding():
    mask = torch.ones(2, 11, dtype=torch.long)
    mask[1, 6:] = 0
    with pytest.raises(ValueError, match="padding, and a cache keeps every token; give rows of one length to generate"):
        wrapped().generate(tokens(), attention_mask=mask, max_new_tokens=1)
