"""Validation of requests: what is accepted, and the one line that says what is wrong with the rest."""

import pytest

from longstride.sampling.params import SamplingParams
from tests.model.small import config

pytest.importorskip("fastapi")
from longstride.serving.completions import MOST_BYTES, read_completion
from longstride.serving.errors import RequestError

TEXT, IMAGE = config(context=64), config(context=24, embedding="image(2, 4, 3)")


def read(mode="refuse", network=TEXT, **body):
    return read_completion(body, "tiny", network, mode)


@pytest.mark.parametrize(
    ("prompt", "expected"),
    [
        ("Thé", ["Thé".encode()]),
        ("", [b""]),
        (None, [b""]),
        ([1, 255], [b"\x01\xff"]),
        (["a", ""], [b"a", b""]),
        ([[1], [], [2, 3]], [b"\x01", b"", b"\x02\x03"]),
    ],
)
def test_prompts(prompt, expected):
    assert read(prompt=prompt).prompts == expected


def test_defaults():
    made = read()
    assert (made.choices, made.length, made.params, made.stop) == (1, 16, SamplingParams(), ())
    assert (made.echo, made.likely, made.stream, made.includes_usage) == (False, None, False, False)
    assert made.seed != read().seed
    assert all(0 <= read().seed < 2**53 for _ in range(50))  # JavaScript rounds larger ones.


def test_values():
    assert read(temperature=0).params == read(top_p=0, temperature=2).params == SamplingParams(top_k=1)
    assert read(temperature=0.5, top_p=0.9, top_k=7).params == SamplingParams(0.5, 7, 0.9)
    assert read(top_p=1).params == SamplingParams()
    assert read(seed=-5).seed == -5
    assert read(stop="é").stop == ("é".encode(),)
    assert read(stop=["a", "bc"]).stop == (b"a", b"bc")
    assert read(stop=[]).stop == ()
    assert read(logprobs=0).likely == 0
    assert read(stream=True, stream_options={"include_usage": True}).includes_usage
    assert read(model="tiny", n=3, best_of=3, user="me", suffix=None, presence_penalty=0, frequency_penalty=0.0,
                logit_bias={}).choices == 3  # fmt: skip
    assert len(read(prompt=["a", "b"], n=3).jobs()) == 6
    assert [job.prompt for job in read(prompt=["a", "b"], n=2).jobs()] == [b"a", b"a", b"b", b"b"]


@pytest.mark.parametrize(
    ("body", "param", "message"),
    [
        ({"prompt": 5}, "prompt", "must be text, a list of bytes"),
        ({"prompt": []}, "prompt", "must be text"),
        ({"prompt": {}}, "prompt", "must be text"),
        ({"prompt": [256]}, "prompt", "from 0 to 255, got 256"),
        ({"prompt": [10**400]}, "prompt", "from 0 to 255"),
        ({"prompt": [1, "a"]}, "prompt", "mixes types"),
        ({"prompt": [True]}, "prompt", "mixes types"),
        ({"prompt": [[1], "a"]}, "prompt", "mixes types"),
        ({"prompt": ["a"] * 129}, "prompt", "at most 128 prompts"),
        ({"prompt": "\ud800"}, "prompt", "lone surrogate"),
        ({"max_tokens": -1}, "max_tokens", "from 0 to"),
        ({"max_tokens": 1.5}, "max_tokens", "whole number"),
        ({"max_tokens": "5"}, "max_tokens", "whole number"),
        ({"max_tokens": 10**30}, "max_tokens", "whole number"),
        ({"n": 0}, "n", "from 1 to 128"),
        ({"n": True}, "n", "whole number"),
        ({"temperature": -0.1}, "temperature", "0 or more"),
        ({"temperature": 1e-9}, "temperature", "at least 0.001"),
        ({"temperature": "hot"}, "temperature", "must be a number"),
        ({"temperature": 1e300}, "temperature", "must be a number"),
        ({"temperature": 10**400}, "temperature", "must be a number"),
        ({"top_p": 1.1}, "top_p", "from 0 to 1"),
        ({"top_k": 0}, "top_k", "from 1 to 256"),
        ({"seed": 2**64}, "seed", "whole number"),
        ({"stop": ""}, "stop", "none of them empty"),
        ({"stop": ["a"] * 17}, "stop", "up to 16"),
        ({"stop": [1]}, "stop", "must be text"),
        ({"stop": "a" * 1025}, "stop", "at most 1,024 bytes"),
        ({"logprobs": 21}, "logprobs", "from 0 to 20"),
        ({"logprobs": True}, "logprobs", "whole number"),
        ({"echo": "yes"}, "echo", "true or false"),
        ({"stream": 1}, "stream", "true or false"),
        ({"stream_options": {}}, "stream_options", "are for stream"),
        ({"stream": True, "stream_options": {"x": 1}}, "stream_options", "include_usage"),
        ({"best_of": 2}, "best_of", "must be n"),
        ({"suffix": "end"}, "suffix", "not supported"),
        ({"presence_penalty": 0.5}, "presence_penalty", "not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias", "not supported"),
        ({"frequency_penalty": False}, "frequency_penalty", "not supported"),
        ({"user": 5}, "user", "must be text"),
        ({"overflow": "wrap"}, "overflow", "refuse, slide"),
        ({"tools": []}, "tools", "no field 'tools'"),
        ({"x" * 500: 1}, "x" * 64, "no field"),
    ],
    ids=str,
)  # fmt: skip
def test_refuses(body, param, message):
    with pytest.raises(RequestError, match=message) as refused:
        read(**body)
    assert (refused.value.param, refused.value.status) == (param, 400)
    assert len(refused.value.message) < 300


def test_another_model_is_not_found():
    for name in ("gpt-9", 5, ["tiny"]):
        with pytest.raises(RequestError) as refused:
            read(model=name)
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")


def test_the_context():
    assert read(prompt="a" * 48).length == 16
    assert read(prompt="a" * 64, max_tokens=0).length == 0
    for body in ({"prompt": "a" * 49}, {"prompt": "a" * 64, "max_tokens": 1}, {"prompt": "a" * 65, "max_tokens": 0}):
        with pytest.raises(RequestError, match="more than the context of 64 bytes; give fewer, or overflow = 'slide'") as no:
            read(**body)
        assert no.value.code == "context_length_exceeded"
        assert read("slide", **body).length == body.get("max_tokens", 16)
        assert read_completion({**body, "overflow": "slide"}, "tiny", TEXT, "refuse").length == body.get("max_tokens", 16)
    for prompt in ([0] * (MOST_BYTES + 1), [0] * MOST_BYTES + ["a"], "a" * (MOST_BYTES + 1)):
        with pytest.raises(RequestError, match="prompt must have at most 1,048,576 bytes, got 1,048,577"):
            read("slide", prompt=prompt)


def test_the_size_of_an_answer():
    """All choices together."""
    assert read("slide", n=8, max_tokens=MOST_BYTES // 8).length == MOST_BYTES // 8
    text = "a" * (MOST_BYTES // 128)
    assert read("slide", prompt=[text] * 128, max_tokens=0, echo=True, logprobs=1).echo  # As lm-eval asks.
    for body, param in [
        ({"n": 8, "max_tokens": MOST_BYTES // 8 + 1}, "max_tokens"),
        ({"prompt": ["a", "b"], "n": 64, "max_tokens": MOST_BYTES}, "max_tokens"),
        ({"prompt": text, "max_tokens": MOST_BYTES, "logprobs": 5}, "logprobs"),
        ({"prompt": [text] * 128, "max_tokens": 0, "echo": True, "logprobs": 20}, "logprobs"),
        ({"prompt": [text] * 128, "n": 5, "max_tokens": 0, "echo": True}, "n"),
    ]:
        with pytest.raises(RequestError, match="ask for") as refused:
            read("slide", **body)
        assert (refused.value.param, refused.value.status) == (param, 400)


def test_an_image_is_made_whole_and_no_more():
    assert read(network=IMAGE).length == 24
    assert read(network=IMAGE, prompt=[0] * 10).length == 14
    assert read(network=IMAGE, prompt=[0] * 24).length == 0
    for overflow in ("refuse", "slide"):
        for body in ({"prompt": [0] * 10, "max_tokens": 15}, {"prompt": [0] * 25}):
            with pytest.raises(RequestError, match="a whole image; give at most 24 in all"):
                read(overflow, IMAGE, **body)
