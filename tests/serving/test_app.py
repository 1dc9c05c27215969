"""The API by its shapes: completions, models, health, metrics."""

import functools
import json
import math
import operator

import pytest
import torch
from prometheus_client.parser import text_string_to_metric_families

from longstride.serving.answers import Job
from tests.serving.small import alone, client, served


@pytest.fixture(scope="module")
def tiny():
    return served()


@pytest.fixture(scope="module")
def api(tiny):
    with client(tiny) as made:
        yield made


def post(api, **body):
    found = api.post("/v1/completions", json=body)
    assert found.status_code == 200, found.text
    return found.json()


def events(api, **body):
    found = api.post("/v1/completions", json={**body, "stream": True})
    assert found.headers["content-type"].startswith("text/event-stream")
    lines = [line.removeprefix("data: ") for line in found.text.split("\n\n") if line]
    assert lines[-1] == "[DONE]"
    return [json.loads(line) for line in lines[:-1]]


def test_a_completion(api, tiny):
    found = post(api, model="tiny", prompt="The ", max_tokens=20, seed=5)
    expected = alone(tiny.model, Job(b"The ", 20, seed=5))
    (choice,) = found["choices"]
    assert bytes(choice["byte_ids"]) == expected
    assert choice["text"] == expected.decode("utf-8", "replace")
    assert (choice["index"], choice["finish_reason"], choice["logprobs"]) == (0, "length", None)
    assert found["usage"] == {"prompt_tokens": 4, "completion_tokens": 20, "total_tokens": 24}
    assert (found["object"], found["model"], found["seed"]) == ("text_completion", "tiny", 5)
    assert found["id"].startswith("cmpl-")


def test_choices_are_those_of_generate(api, tiny):
    found = post(api, prompt=["ab", "c"], n=2, max_tokens=9, seed=1)
    jobs = [Job(prompt, 9, seed=1, index=index) for index, prompt in enumerate([b"ab", b"ab", b"c", b"c"])]
    assert [bytes(choice["byte_ids"]) for choice in found["choices"]] == [alone(tiny.model, job) for job in jobs]
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["prompt_tokens"] == 3


def test_a_stream_is_the_same_as_the_whole(api):
    body = {"prompt": "é", "n": 3, "max_tokens": 15, "seed": 3, "echo": True, "logprobs": 2, "stop": "\x00"}
    whole, chunks = post(api, **body), events(api, **body)
    for choice in whole["choices"]:
        parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"][0]["index"] == choice["index"]]
        assert "".join(part["text"] for part in parts) == choice["text"]
        assert functools.reduce(operator.iadd, (part["byte_ids"] for part in parts), []) == choice["byte_ids"]
        for name, values in choice["logprobs"].items():
            assert functools.reduce(operator.iadd, (part["logprobs"][name] for part in parts), []) == values
        assert parts[-1]["finish_reason"] == choice["finish_reason"]
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert all("usage" not in chunk for chunk in chunks)


def test_an_event_is_one_line_wherever_a_client_ends_lines(api):
    """str.splitlines, as many clients use, knows more line ends than server-sent events have."""
    prompt = "a\n\r\v\f\x1c\x1d\x1e\x85\u2028\u2029b"
    body = {"prompt": prompt, "max_tokens": 0, "echo": True, "logprobs": 0, "stream": True}
    lines = api.post("/v1/completions", json=body).text.splitlines()
    event, done = [line.removeprefix("data: ") for line in lines if line]
    assert json.loads(event)["choices"][0]["text"] == prompt
    assert done == "[DONE]"


def test_a_stream_names_the_seed_that_repeats_it(api):
    body = {"prompt": "ab", "max_tokens": 20}
    chunks = events(api, **body, stream_options={"include_usage": True})
    (seed,) = {chunk["seed"] for chunk in chunks}
    again = post(api, **body, seed=seed)
    made = [byte for chunk in chunks for choice in chunk["choices"] for byte in choice["byte_ids"]]
    assert again["choices"][0]["byte_ids"] == made
    assert again["seed"] == seed


def test_usage_at_the_end_of_a_stream(api):
    *chunks, last = events(api, prompt="ab", max_tokens=3, stream_options={"include_usage": True})
    assert last["choices"] == []
    assert last["usage"] == {"prompt_tokens": 2, "completion_tokens": 3, "total_tokens": 5}
    assert all(chunk["usage"] is None for chunk in chunks)


def test_stop(api, tiny):
    text = alone(tiny.model, Job(b"", 40, seed=8)).decode("latin-1")
    stop = next(character for character in text[5:] if ord(character) < 128)
    found = post(api, prompt="", max_tokens=40, seed=8, stop=[stop, "never"])["choices"][0]
    assert bytes(found["byte_ids"]).decode("latin-1") == text[: text.index(stop)]
    assert found["finish_reason"] == "stop"


@pytest.mark.parametrize("as_ids", [True, False])
@pytest.mark.parametrize("length", [0, 1])
def test_as_lm_eval_asks_for_the_likelihood_of_a_text(api, tiny, as_ids, length):
    """Token ids or text, echoed with logprobs: the sums are those of evaluation."""
    context, continuation = b"The cat sat ", b"on the mat."
    prompt = context + continuation
    found = post(
        api, model="tiny", prompt=list(prompt) if as_ids else prompt.decode(), temperature=0, max_tokens=length, logprobs=1,
        seed=1234, echo=True,
    )["choices"][0]["logprobs"]  # fmt: skip
    end = len(prompt)
    with torch.no_grad():
        logits = tiny.model(torch.tensor([list(prompt)]))[0].double().log_softmax(-1)
    nats = -logits.gather(1, torch.tensor(list(prompt))[:, None])[len(context) :, 0].sum()
    assert math.isclose(-sum(found["token_logprobs"][len(context) : end]), float(nats), rel_tol=1e-5)
    greedy = [max(top.values()) == own for top, own in zip(found["top_logprobs"], found["token_logprobs"])]
    assert greedy[:end] == (logits.argmax(-1) == torch.tensor(list(prompt))).tolist()
    assert "".join(found["tokens"][:end]) == prompt.decode()
    assert found["text_offset"][:end] == list(range(end))
    assert len(found["tokens"]) == len(found["top_logprobs"]) == end + length


def test_greedy_and_top_p(api, tiny):
    from longstride.sampling.params import SamplingParams

    for body, params in (({"temperature": 0}, SamplingParams(top_k=1)), ({"top_p": 0.5}, SamplingParams(top_p=0.5))):
        found = post(api, prompt="x", max_tokens=12, seed=4, **body)["choices"][0]["byte_ids"]
        assert bytes(found) == alone(tiny.model, Job(b"x", 12, params, seed=4))


def test_the_window_slides_if_asked(api, tiny):
    prompt = "a" * 100
    refused = api.post("/v1/completions", json={"prompt": prompt})
    assert (refused.status_code, refused.json()["error"]["code"]) == (400, "context_length_exceeded")
    found = post(api, prompt=prompt, overflow="slide", max_tokens=5, seed=1)["choices"][0]["byte_ids"]
    assert len(found) == 5
    found = post(api, prompt="a", overflow="slide", max_tokens=100, seed=1)["choices"][0]["byte_ids"]
    assert bytes(found) == alone(tiny.model, Job(b"a", 100, seed=1))


def test_brackets_in_a_prompt(api):
    found = post(api, prompt="[" * 100_001, overflow="slide", max_tokens=2)
    assert found["usage"]["prompt_tokens"] == 100_001


def test_models(api):
    found = api.get("/v1/models").json()
    assert found["object"] == "list"
    (one,) = found["data"]
    assert (one["id"], one["object"], one["owned_by"], one["context"]) == ("tiny", "model", "longstride", 64)
    assert api.get("/v1/models/tiny").json() == one
    for name in ("other", "../etc/passwd", "%2e%2e/x", "a/b"):
        found = api.get(f"/v1/models/{name}")
        assert found.status_code == 404
        assert "passwd" not in found.text


def test_health_and_metrics(api):
    assert api.get("/health").json() == {"status": "ok"}
    families = {family.name: family for family in text_string_to_metric_families(api.get("/metrics").text)}
    assert families["longstride_places"].samples[0].value == 4
    before = families["longstride_bytes"].samples[0].value
    post(api, prompt="abc", max_tokens=7)
    assert api.post("/v1/completions", json={"n": 0}).status_code == 400
    families = {family.name: family for family in text_string_to_metric_families(api.get("/metrics").text)}
    assert families["longstride_bytes"].samples[0].value == before + 7
    assert {sample.labels["status"] for sample in families["longstride_requests"].samples} >= {"200", "400"}
    buckets = [sample.value for sample in families["longstride_request_seconds"].samples if sample.name.endswith("_bucket")]
    assert buckets == sorted(buckets)


@pytest.mark.parametrize("path", ["/docs", "/redoc", "/openapi.json", "/v1", "/v1/chat/completions", "/static/../x"])
def test_nothing_else_is_there(api, path):
    found = api.get(path)
    assert found.status_code == 404
    assert found.json()["error"]["type"] == "not_found_error"
    assert "POST /v1/completions" in found.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/health", "/metrics", "/v1/models", "/", "/static/main.js", "/page/about", "/nowhere"])
def test_heads(api, path):
    """As monitors ask."""
    head, whole = api.head(path), api.get(path)
    assert head.status_code == whole.status_code
    assert head.content == b"" != whole.content
    assert head.headers["content-type"] == whole.headers["content-type"]


def test_other_methods(api):
    assert api.get("/v1/completions").status_code == 405
    assert api.delete("/v1/models").status_code == 405
    assert api.head("/v1/completions").status_code == 405


@pytest.mark.parametrize(
    "content",
    [b"", b"{", b"[]", b"5", b"null", b'{"a": 1e999}', b'{"a": NaN}', b"\xff\xfe", b'{"n": ' + b"9" * 5000 + b"}",
     b'{"prompt": ' + b"[" * 50 + b"]" * 50 + b"}", b"[" * 100_001, b'{"prompt": "\\ud800"}', b'{"prompt": "\x00"}'],
    ids=lambda content: str(content[:20]),
)  # fmt: skip
def test_bodies_that_are_no_request(api, content):
    found = api.post("/v1/completions", content=content, headers={"content-type": "application/json"})
    assert found.status_code == 400
    assert set(found.json()["error"]) == {"message", "type", "param", "code"}


def test_more_choices_than_can_ever_be_served():
    with client(streams=2, queue=3) as api:
        assert api.post("/v1/completions", json={"n": 5, "max_tokens": 1}).status_code == 200
        found = api.post("/v1/completions", json={"n": 6, "max_tokens": 1})
    assert found.status_code == 400
    assert found.json()["error"]["param"] == "n"


def test_a_model_that_fails_is_an_error_of_the_server(caplog):
    tiny = served()
    tiny.model.embedding.token.weight.data[7] = torch.inf
    with client(tiny) as api:
        found = api.post("/v1/completions", json={"prompt": [7], "max_tokens": 3})
        assert (found.status_code, found.json()["error"]["code"]) == (500, "model_error")
        chunks = api.post("/v1/completions", json={"prompt": [7], "max_tokens": 3, "stream": True}).text
        assert "not finite" in chunks
        assert "[DONE]" not in chunks
        found = api.post("/v1/completions", json={"prompt": [7, 8], "max_tokens": 0, "echo": True, "logprobs": 1})
        assert (found.status_code, found.json()["error"]["code"]) == (500, "model_error")
        assert post(api, prompt="a", max_tokens=3)


def test_images_are_made_whole():
    with client(served("bytes", embedding="image(2, 4, 3)", context=24)) as api:
        assert len(post(api, prompt=[1, 2, 3])["choices"][0]["byte_ids"]) == 21
        assert api.post("/v1/completions", json={"prompt": [1, 2, 3], "max_tokens": 22}).status_code == 400
