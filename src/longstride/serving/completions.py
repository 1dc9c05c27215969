"""Requests for completions: the fields of OpenAI's API and ours, validated, and the samples that they ask for."""

import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import isfinite
from typing import Any

from longstride.common.checks import short_repr
from longstride.model import ModelConfig
from longstride.sampling.params import SamplingParams
from longstride.serving.answers import Job
from longstride.serving.errors import RequestError

DEFAULT_LENGTH = 16
"""Bytes of an answer to a request without max_tokens, as OpenAI has it. Images are then made whole."""
MOST_BYTES = 2**20
"""The most bytes of a prompt, and of all choices of a request together."""
MOST_NUMBERS = 2**22
"""The most bytes and logprobs of an answer, with the prompts that it repeats: each takes up to 100 bytes of memory."""
MOST_PROMPTS = 128
MOST_CHOICES = 128
"""The most choices for each prompt."""
MOST_LIKELY = 20
"""The most bytes listed for each position with logprobs."""
MOST_STOPS, LONGEST_STOP = 16, 1024
"""The most stop sequences, and the most bytes of each."""
LONGEST_USER = 1024
SEED_BITS = 53
"""Of a seed that the server chooses: JavaScript rounds larger integers."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "suffix": ("",),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
}
"""Fields of OpenAI's that the model has nothing for, with the values that ask for nothing; null is another."""
FIELDS = frozenset(
    ("model", "prompt", "max_tokens", "temperature", "top_p", "top_k", "n", "best_of", "seed", "stop", "echo", "logprobs",
     "stream", "stream_options", "user", "overflow", *NEUTRAL)
)  # fmt: skip


@dataclass(frozen=True)
class Completion:
    """What a request asks for."""

    prompts: list[bytes]
    choices: int
    """For each prompt."""
    length: int
    """Bytes of each."""
    params: SamplingParams
    seed: int
    stop: tuple[bytes, ...]
    echo: bool
    likely: int | None
    """Bytes listed for each position with logprobs; None without logprobs."""
    stream: bool
    includes_usage: bool

    def jobs(self) -> list[Job]:
        """The samples, by the index of their choice."""
        prompts = [prompt for prompt in self.prompts for _ in range(self.choices)]
        scores = self.echo and self.likely is not None
        return [
            Job(prompt, self.length, self.params, self.seed, index, self.stop, self.likely, scores_prompt=scores)
            for index, prompt in enumerate(prompts)
        ]


def read_completion(body: Mapping[str, Any], name: str, config: ModelConfig, overflow: str) -> Completion:
    """Validates a request's body. name: of the model. overflow: "refuse" or "slide", if the request does not say."""
    for field in body:
        if field not in FIELDS:
            raise RequestError(f"there is no field {short_repr(field)}; leave it out", field[:64])
    for field, values in NEUTRAL.items():
        _check_neutral(body, field, values)
    if body.get("model") is not None and body["model"] != name:
        message = f"the model {short_repr(body['model'])} is not served here; the model is {name!r}"
        raise RequestError(message, "model", code="model_not_found", status=404)
    user = body.get("user")
    if user is not None and (not isinstance(user, str) or len(user) > LONGEST_USER):
        raise RequestError(f"user must be text of at most {LONGEST_USER} characters, got {short_repr(user)}", "user")
    prompts = _read_prompts(body.get("prompt"))
    choices = _whole(body, "n", 1, MOST_CHOICES, 1)
    if body.get("best_of") is not None and _whole(body, "best_of", 1, MOST_CHOICES, 1) != choices:
        raise RequestError(f"best_of must be n, which is {choices}, got {body['best_of']}; leave it out", "best_of")
    overflow = _choice(body, "overflow", ("refuse", "slide"), overflow)
    echo = _flag(body, "echo")
    likely = _whole(body, "logprobs", 0, MOST_LIKELY) if body.get("logprobs") is not None else None
    length = _read_length(body, prompts, config, overflow)
    _check_size(prompts, choices, length, echo, likely)
    stream = _flag(body, "stream")
    return Completion(
        prompts, choices, length, _read_params(body), _read_seed(body), _read_stops(body.get("stop")), echo, likely, stream,
        _read_stream_options(body.get("stream_options"), stream),
    )  # fmt: skip


def _read_prompts(given: Any) -> list[bytes]:
    if given is None:
        return [b""]
    if isinstance(given, str):
        return [_encode(given, "prompt")]
    if not isinstance(given, list) or not given:
        raise RequestError(
            f"prompt must be text, a list of bytes (0 to 255), or a list of either, got {short_repr(given)}", "prompt"
        )
    if _is_whole(given[0]) and len(given) > MOST_BYTES:  # Before each of them is looked at.
        raise RequestError(f"prompt must have at most {MOST_BYTES:,} bytes, got {len(given):,}", "prompt")
    if all(_is_whole(item) for item in given):
        return [_to_bytes(given)]
    if len(given) > MOST_PROMPTS:
        raise RequestError(f"prompt must have at most {MOST_PROMPTS} prompts, got {len(given):,}", "prompt")
    if all(isinstance(item, str) for item in given):
        return [_encode(item, "prompt") for item in given]
    if all(isinstance(item, list) and all(map(_is_whole, item)) for item in given):
        return [_to_bytes(item) for item in given]
    raise RequestError("prompt mixes types: give texts only, or lists of bytes only", "prompt")


def _encode(text: str, param: str) -> bytes:
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        message = f"{param} has a lone surrogate at character {error.start}, which is no text; give a list of bytes"
        raise RequestError(message, param) from None


def _to_bytes(ids: Sequence[int]) -> bytes:
    try:
        return bytes(ids)
    except ValueError:
        wrong = next(number for number in ids if not 0 <= number < 256)
        raise RequestError(f"prompt must have bytes from 0 to 255, got {short_repr(wrong)}", "prompt") from None


def _read_length(body: Mapping[str, Any], prompts: Sequence[bytes], config: ModelConfig, overflow: str) -> int:
    """Returns the bytes of each choice, if they and the prompts fit the context, or slide."""
    context, longest = config.context, max(map(len, prompts))
    is_item = len(config.positions.sizes) == 3
    default = max(0, context - longest) if is_item else DEFAULT_LENGTH
    length = _whole(body, "max_tokens", 0, MOST_BYTES, default)
    if longest > MOST_BYTES:
        raise RequestError(f"prompt must have at most {MOST_BYTES:,} bytes, got {longest:,}", "prompt")
    if longest + length <= context and (longest < context or not length):
        return length
    asked = f"a prompt of {longest:,} bytes and max_tokens = {length:,} are more than the context of {context:,} bytes"
    if is_item:
        message = f"{asked}, which is a whole image; give at most {context:,} in all"
        raise RequestError(message, "prompt" if longest > context else "max_tokens", code="context_length_exceeded")
    if overflow == "refuse":
        message = f"{asked}; give fewer, or overflow = 'slide', with which the window slides and earlier bytes are forgotten"
        raise RequestError(message, "prompt" if longest > context else "max_tokens", code="context_length_exceeded")
    return length


def _check_size(prompts: Sequence[bytes], choices: int, length: int, echo: bool, likely: int | None) -> None:
    """Refuses what would keep the model from others, or fill the memory."""
    made = len(prompts) * choices * length
    if made > MOST_BYTES:
        count = len(prompts) * choices
        message = f"{count:,} choices of {length:,} bytes are {made:,}; ask for at most {MOST_BYTES:,} in all"
        raise RequestError(message, "max_tokens")
    repeated = choices * sum(map(len, prompts)) if echo else 0
    numbers = (made + repeated) * (1 if likely is None else 2 + likely)
    if numbers > MOST_NUMBERS:
        message = f"the answer would have {numbers:,} bytes and logprobs; ask for at most {MOST_NUMBERS:,}"
        raise RequestError(message, "n" if likely is None else "logprobs")


def _read_params(body: Mapping[str, Any]) -> SamplingParams:
    """Returns the distribution that bytes are drawn from; the likeliest byte for temperature or top_p 0."""
    temperature, top_p = _number(body, "temperature", 1.0), _number(body, "top_p", 1.0)
    top_k = _whole(body, "top_k", 1, 256) if body.get("top_k") is not None else None
    if temperature < 0:
        raise RequestError(f"temperature must be 0 or more, got {temperature}", "temperature")
    if not 0 <= top_p <= 1:
        raise RequestError(f"top_p must be from 0 to 1, got {top_p}", "top_p")
    if temperature == 0 or top_p == 0:
        return SamplingParams(top_k=1)
    try:
        return SamplingParams(temperature, top_k, top_p if top_p < 1 else None)
    except ValueError as error:
        raise RequestError(str(error).removeprefix("generate: "), "temperature") from None


def _read_seed(body: Mapping[str, Any]) -> int:
    if body.get("seed") is None:
        return secrets.randbits(SEED_BITS)
    return _whole(body, "seed", -(2**63), 2**64 - 1)


def _read_stops(given: Any) -> tuple[bytes, ...]:
    if given is None:
        return ()
    stops = [given] if isinstance(given, str) else given
    if not isinstance(stops, list) or len(stops) > MOST_STOPS or not all(isinstance(stop, str) and stop for stop in stops):
        message = f"stop must be text, or a list of up to {MOST_STOPS} texts, none of them empty, got {short_repr(given)}"
        raise RequestError(message, "stop")
    encoded = tuple(_encode(stop, "stop") for stop in stops)
    if any(len(stop) > LONGEST_STOP for stop in encoded):
        raise RequestError(f"stop must have at most {LONGEST_STOP:,} bytes, got {max(map(len, encoded)):,}", "stop")
    return encoded


def _read_stream_options(given: Any, stream: bool) -> bool:
    """Returns whether the stream ends with the usage."""
    if given is None:
        return False
    if not stream:
        raise RequestError("stream_options are for stream = true; leave them out", "stream_options")
    if not isinstance(given, dict) or not set(given) <= {"include_usage", "include_obfuscation"}:
        message = f"stream_options must be an object with include_usage, got {short_repr(given)}"
        raise RequestError(message, "stream_options")
    _flag(given, "include_obfuscation")
    return _flag(given, "include_usage")


def _check_neutral(body: Mapping[str, Any], field: str, values: tuple[Any, ...]) -> None:
    given = body.get(field)
    if given is not None and (isinstance(given, bool) or given not in values):
        message = f"{field} = {short_repr(given)} is not supported; leave it out, or give {short_repr(values[0])}"
        raise RequestError(message, field, code="unsupported_value")


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _whole(body: Mapping[str, Any], field: str, least: int, most: int, default: int | None = None) -> int:
    value: Any = body.get(field)
    if value is None and default is not None:
        return default
    if not _is_whole(value) or not least <= value <= most:
        raise RequestError(f"{field} must be a whole number from {least} to {most}, got {short_repr(value)}", field)
    return int(value)


def _number(body: Mapping[str, Any], field: str, default: float) -> float:
    value = body.get(field)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int | float) or abs(value) > 1e30 or not isfinite(value):
        raise RequestError(f"{field} must be a number, got {short_repr(value)}", field)
    return float(value)


def _flag(body: Mapping[str, Any], field: str) -> bool:
    value = body.get(field)
    if value is not None and not isinstance(value, bool):
        raise RequestError(f"{field} must be true or false, got {short_repr(value)}", field)
    return bool(value)


def _choice(body: Mapping[str, Any], field: str, values: Sequence[str], default: str) -> str:
    value = body.get(field)
    if value is None:
        return default
    if not isinstance(value, str) or value not in values:
        raise RequestError(f"{field} must be one of {', '.join(values)}, got {short_repr(value)}", field)
    return value
