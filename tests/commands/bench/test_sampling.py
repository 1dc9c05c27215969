import io
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console

from longstride.commands.bench import checks, sampling, sampling_peers
from longstride.commands.bench.measure import Ceilings
from longstride.commands.bench.sampling import NothingTimedError, Ours, Row, SamplingBenchmark, Task, random_model, run
from longstride.commands.bench.sampling_peers import Timing, Transformers, Uncached
from longstride.model import cache
from tests.model import small

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    """A small network by every name, and a machine that copies a megabyte in a second and has no transformers."""
    monkeypatch.setattr(checks, "preset", lambda name: small.config())
    monkeypatch.setattr(sampling, "ceilings", lambda dtype, device: Ceilings(1e6, 1e9))
    monkeypatch.setattr(sampling_peers, "find_spec", lambda name: None)


def quiet():
    return Console(file=io.StringIO(), width=140)


def said(console):
    return console.file.getvalue()


def test_every_batch_and_position_has_a_row_of_each(tmp_path):
    path, console = tmp_path / "result.json", quiet()
    settings = SamplingBenchmark(batches=(1, 3), positions=(0, 10), bytes=5, repeats=2, device="cpu", json=path)
    result = run(settings, console)
    assert [(row.batch, row.position, row.name) for row in result.rows] == [
        (batch, position, name) for batch in (1, 3) for position in (0, 10) for name in ("longstride", "no cache")
    ]
    for row in result.rows:
        assert row.bytes_per_second * row.step_us == pytest.approx(row.batch * 1e6, rel=1e-4)
        assert row.of_floor * row.floor_us == pytest.approx(row.step_us, rel=1e-4)
        assert row.timed == (5 if row.name == "longstride" else 4)
    saved = json.loads(path.read_text())
    assert [row["step_us"] for row in saved["rows"]] == [row.step_us for row in result.rows]
    assert {"device", "threads", "torch"} <= saved["machine"].keys()
    assert saved["settings"]["positions"] == [0, 10]
    text = said(console)
    assert "longstride, 3 streams: position 10 takes " in text
    assert "the whole context, 24 bytes at the slowest rate above" in text


def test_what_is_not_installed_is_said_to_be_left_out():
    console = quiet()
    result = run(SamplingBenchmark(batches=(1,), positions=(4,), bytes=1, repeats=1, device="cpu"), console)
    assert {row.name for row in result.rows} == {"longstride", "no cache"}
    assert "left out: transformers is not installed" in said(console)


def test_the_floor_and_the_cache_are_of_the_bytes_that_were_timed():
    model = random_model(small.config(), CPU)
    ours, prompts = Ours(model), torch.zeros(2, 10, dtype=torch.uint8)
    row = sampling._row(Task("longstride", ours, prompts, 3, [Timing(0.5, 11, 3)] * 3), Ceilings(1e6, 1e9))
    keys = 0
    for block in range(3):
        for head in cache.block_slots(model.config, block):
            keys += sum(len(head.seen(position)) for position in (11, 12, 13))
    tables = [*model.embedding.position.values(), model.embedding.token]
    weights = model.parameter_count() - sum(one.weight.numel() for one in tables) - model.embedding.start.numel()
    assert row.floor_us == pytest.approx(4 * (weights + 2 * keys / 3 * (8 + 8)), rel=1e-4)
    assert row.of_floor == pytest.approx(5e5 / row.floor_us, rel=1e-4)
    slots = [max(head.count for head in cache.block_slots(model.config, block, 14)) for block in range(3)]
    assert row.cache_mib == pytest.approx(2 * 4 * sum(slots) * 32 / 2**20, rel=1e-4)
    assert (row.step_us, row.bytes_per_second) == (5e5, 4)


def test_all_positions_take_turns_and_the_median_counts_but_not_the_first_round():
    seconds = {4: [9.0, 1.0, 3.0, 2.0], 6: [8.0, 4.0, 5.0, 6.0]}
    order = []

    class Planned(Ours):
        def time(self, prompts, steps):
            position = prompts.shape[1]
            order.append(position)
            return Timing(seconds[position].pop(0), position + 1, steps)

    planned = Planned(random_model(small.config(), CPU))
    tasks = [Task("longstride", planned, torch.zeros(1, position, dtype=torch.uint8), 2) for position in (4, 6)]
    sampling.take_turns(tasks, 3, lambda: None)
    assert order == [4, 6] * 4
    assert [one.seconds for one in tasks[0].timings] == [1.0, 3.0, 2.0]
    assert [sampling._row(task, Ceilings(1e6, 1e9)).step_us for task in tasks] == [2e6, 5e6]


@pytest.mark.parametrize("sizes", [[1] * 20, [8, 8, 8], [2, 5, 1, 4], [9, 3, 2]])
def test_only_what_comes_after_the_first_piece_is_timed(monkeypatch, sizes):
    clock = SimpleNamespace(now=100.0)

    def pieces(model, prompts, length):
        assert [len(prompt) for prompt in prompts] == [3, 3]
        clock.now += 50  # the prompt
        for size in sizes:
            clock.now += size
            yield [bytes(size)] * 2
        clock.now += 70  # what it has is let go

    monkeypatch.setattr(sampling, "generate", pieces)
    monkeypatch.setattr(sampling, "perf_counter", lambda: clock.now)
    found = Ours(random_model(small.config(), CPU)).time(torch.zeros(2, 3, dtype=torch.uint8), 6)
    assert (found.seconds, found.first) == (1.0, 3 + sizes[0])
    assert min(6, sum(sizes[1:])) <= found.steps < 6 + max(sizes)


def test_bytes_that_all_come_at_once_are_no_measurement(monkeypatch):
    monkeypatch.setattr(sampling, "generate", lambda model, prompts, length: iter([[bytes(length)]]))
    ours = Ours(random_model(small.config(), CPU))
    with pytest.raises(NothingTimedError, match="all 21 bytes came at once"):
        ours.time(torch.zeros(1, 3, dtype=torch.uint8), 6)
    console = quiet()
    result = run(SamplingBenchmark(batches=(1,), positions=(3,), bytes=1, repeats=1, peers="none", device="cpu"), console)
    assert "NothingTimedError" in (result.rows[0].failure or "")
    assert "longstride, 1 stream, position 3 did not run: NothingTimedError: all 21 bytes" in said(console)


def test_a_fault_of_ours_is_not_hidden_and_one_of_a_peer_is_a_row(monkeypatch):
    settings = SamplingBenchmark(batches=(1,), positions=(3,), bytes=1, repeats=1, device="cpu")

    def broken(self, prompts, steps):
        raise RuntimeError("out of luck\nand more")

    with monkeypatch.context() as patch:
        patch.setattr(Uncached, "time", broken)
        ours, peer = run(settings, quiet()).rows
        assert (ours.failure, peer.failure, peer.step_us) == (None, "RuntimeError: out of luck and more", None)
        assert ours.step_us
    monkeypatch.setattr(Ours, "time", broken)
    with pytest.raises(RuntimeError, match="out of luck"):
        run(settings, quiet())


def test_random_weights_reach_the_logits():
    model = random_model(small.config(dropout=0.3), CPU)
    logits = model(small.some_bytes(1))
    assert logits.std() > 0.1
    assert not model.training


def test_without_a_cache_bytes_come_from_all_before_them(monkeypatch):
    """It is the same work, done anew for each byte: else its time would say nothing."""
    drawn = []
    draw = torch.multinomial
    monkeypatch.setattr(torch, "multinomial", lambda odds, count: drawn.append((odds, draw(odds, count))) or drawn[-1][1])
    model, prompts = random_model(small.config(), CPU), small.some_bytes(2, 7).to(torch.uint8)
    assert Uncached(model).time(prompts, 9)[1:] == (8, sampling_peers.UNCACHED_STEPS)
    whole = torch.cat([prompts, *(made for _, made in drawn)], 1)
    assert whole.shape == (2, 7 + 5)
    expected = model(whole).softmax(-1)[:, 7:]
    assert torch.allclose(torch.stack([odds for odds, _ in drawn], 1), expected, atol=1e-5)


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"positions": (23,)}, "positions has 23, and the context of enwik8 is 24; give at most 22"),
        ({"positions": (-1,)}, "positions must be at least 0, got -1"),
        ({"batches": (0,)}, "batches must be at least 1, got 0"),
        ({"batches": (2, 2)}, "batches must be one or more different ones"),
        ({"positions": ()}, "positions must be one or more different ones"),
        ({"bytes": 0}, "bytes must be at least 1, got 0"),
        ({"repeats": 0}, "repeats must be at least 1, got 0"),
        ({"picture": "rates.gif"}, "rates.gif must end in .png or .svg"),
        ({"device": "nowhere"}, "device = 'nowhere' cannot be used"),
    ],
)
def test_mistakes_are_named(given, says):
    with pytest.raises(ValueError, match=f"^bench sampling: .*{says}"):
        run(SamplingBenchmark(**{"positions": (4,), "peers": "none", **given}), quiet())


class FakeGPT2(torch.nn.Module):
    """The parts of transformers' GPT-2 that are written to, in its shapes, and a generate() that asks as its own does."""

    def __init__(self, config):
        super().__init__()
        self.config, self.generation_config = config, SimpleNamespace(eos_token_id=7)
        width, inner = config.n_embd, config.n_inner

        def conv(rows, columns):
            made = torch.nn.Module()
            made.weight = torch.nn.Parameter(torch.zeros(rows, columns))
            made.bias = torch.nn.Parameter(torch.zeros(columns))
            return made

        def block():
            made = torch.nn.Module()
            made.ln_1, made.ln_2 = torch.nn.LayerNorm(width), torch.nn.LayerNorm(width)
            made.attn, made.mlp = torch.nn.Module(), torch.nn.Module()
            made.attn.c_attn, made.attn.c_proj = conv(width, 3 * width), conv(width, width)
            made.mlp.c_fc, made.mlp.c_proj = conv(width, inner), conv(inner, width)
            return made

        self.transformer = torch.nn.Module()
        self.transformer.wte = torch.nn.Embedding(256, width)
        self.transformer.wpe = torch.nn.Embedding(config.n_positions, width)
        self.transformer.h = torch.nn.ModuleList(block() for _ in range(config.n_layer))
        self.transformer.ln_f = torch.nn.LayerNorm(width)
        self.lm_head = torch.nn.Linear(width, 256, bias=False)

    def generate(self, tokens, stopping_criteria, **options):
        self.options, self.given = options, tokens
        for _ in range(options["max_new_tokens"]):
            tokens = torch.cat([tokens, tokens[:, :1]], 1)
            assert not any(criterion(tokens, None).any() for criterion in stopping_criteria)
        return tokens


@pytest.fixture
def fake_transformers(monkeypatch):
    module = SimpleNamespace(
        GPT2Config=lambda **fields: SimpleNamespace(**fields), GPT2LMHeadModel=FakeGPT2, StoppingCriteriaList=list
    )
    monkeypatch.setitem(sys.modules, "transformers", module)


def test_transformers_has_our_numbers_and_weights(fake_transformers):
    model = random_model(small.config(ff_ratio=2.0), CPU)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter)
    peer = Transformers(model)
    theirs = peer.model
    config = theirs.config
    assert (config.n_layer, config.n_embd, config.n_head, config.n_positions, config.n_inner) == (3, 16, 2, 24, 32)
    assert config.tie_word_embeddings is False
    assert theirs.generation_config.eos_token_id is None
    x = torch.randn(5, 16)
    for ours, other in zip(model.blocks, theirs.transformer.h):
        for one, another in (
            (ours.attention.query_key_value, other.attn.c_attn),
            (ours.attention.project, other.attn.c_proj),
            (ours.ff.inner, other.mlp.c_fc),
        ):
            assert torch.equal(x @ another.weight + another.bias, x @ one.weight.T + one.bias)
        assert torch.equal(other.mlp.c_proj.weight, ours.ff.outer.weight.T)
        assert torch.equal(other.ln_1.weight, ours.norm_attention.weight)
        assert torch.equal(other.ln_2.bias, ours.norm_ff.bias)
    assert torch.equal(theirs.lm_head.weight, model.output.weight)
    assert torch.equal(theirs.transformer.wte.weight, model.embedding.token.weight)
    assert torch.equal(theirs.transformer.ln_f.weight, model.norm.weight)


def test_transformers_makes_exactly_the_bytes_that_are_timed(fake_transformers):
    peer = Transformers(random_model(small.config(), CPU))
    assert peer.time(torch.zeros(2, 5, dtype=torch.uint8), 6)[1:] == (6, 6)
    options = peer.model.options
    assert options["min_new_tokens"] == options["max_new_tokens"] == 7
    assert (options["do_sample"], options["use_cache"], options["top_k"]) == (True, True, 0)
    assert peer.model.given.dtype == torch.int64
    peer.time(torch.zeros(2, 0, dtype=torch.uint8), 6)
    assert peer.model.given.shape == (2, 1)  # It has no start vector.
    assert peer.time(torch.zeros(1, 5, dtype=torch.uint8), 999).steps == sampling_peers.TRANSFORMERS_STEPS


def test_transformers_takes_part_where_it_is_installed(fake_transformers, monkeypatch):
    monkeypatch.setattr(sampling_peers, "find_spec", lambda name: name)
    monkeypatch.setattr(sampling_peers, "version", lambda name: "5.0")
    result = run(SamplingBenchmark(batches=(2,), positions=(3,), bytes=4, repeats=1, device="cpu"), quiet())
    assert [row.name for row in result.rows] == ["longstride", "no cache", "transformers"]
    assert result.machine["transformers"] == "5.0"
    assert not result.left_out


def test_transformers_floor_is_that_of_a_dense_network(fake_transformers):
    peer = Transformers(random_model(small.config(), CPU))
    read = [parameter for name, parameter in peer.model.named_parameters() if not name.startswith("transformer.w")]
    weights = sum(parameter.numel() for parameter in read)
    seen = [10, 11, 12]  # by positions 9 to 11
    assert peer.floor_bytes(2, 9, 3) == 4 * (weights + 2 * sum(seen) / 3 * 2 * 3 * 16)
    assert peer.cache_bytes(2, 12) == 4 * 2 * 12 * 2 * 3 * 16


def test_queries_and_keys_that_are_smaller_are_not_copied(fake_transformers):
    model = random_model(small.config(qk_ratio=0.5), CPU)
    theirs = Transformers(model).model
    assert torch.equal(theirs.transformer.h[0].attn.c_attn.weight, torch.zeros(16, 48))
    assert torch.equal(theirs.transformer.h[0].attn.c_proj.weight, model.blocks[0].attention.project.weight.T)


def test_transformers_computes_our_network():
    """All that differs is made alike: the positions, and the start vector, which it has none of."""
    pytest.importorskip("transformers")
    model = random_model(small.config(pattern="dense()"), CPU)
    peer = Transformers(model)
    assert peer.time(small.some_bytes(2, 5).to(torch.uint8), 4)[1:] == (6, 4)
    tokens = small.some_bytes(2, 9)
    with torch.no_grad():
        h = model.embedding.token(tokens) + peer.model.transformer.wpe.weight[:9]
        for block in model.blocks:
            h = block(h)
        theirs = peer.model(tokens, attention_mask=torch.ones_like(tokens)).logits
    assert torch.allclose(theirs, model.logits(h), atol=1e-4)


def test_rows_without_figures_are_shown():
    console = quiet()
    result = sampling.Result({}, {"preset": "enwik8"}, 24, Ceilings(1e6, 1e9), [Row("transformers", 1, 2, failure="no")])
    sampling.show(result, console)
    assert "transformers, 1 stream, position 2 did not run: no" in said(console)
