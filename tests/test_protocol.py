"""What clients may send, and the body of every error."""

import random
from typing import Any

import pytest
from pydantic import ValidationError

from d3d_ray.records import Mode, Sampling
from d3d_ray.runtime.answers import RequestFailedError, VerifierDiedError
from d3d_ray.serving.errors import from_validation, to_api_error
from d3d_ray.serving.protocol import ChatRequest, CompletionRequest, TokenizeRequest
from d3d_ray.serving.stops import StopFinder

MESSAGES = [{"role": "user", "content": "Hi"}]


def chat(**fields: Any) -> ChatRequest:
    return ChatRequest.model_validate({"messages": MESSAGES, **fields})


def complete(**fields: Any) -> CompletionRequest:
    return CompletionRequest.model_validate({"prompt": "Hi", **fields})


def test_a_chat_request_gives_its_sampling() -> None:
    request = chat(
        temperature=0.5, top_p=0.9, top_k=-1, seed=3, stop_token_ids=[5, 6], min_tokens=2,
        max_tokens=9, max_completion_tokens=7, logprobs=True, top_logprobs=4, mode="sync",
    )  # fmt: skip
    assert request.sampling() == Sampling(
        temperature=0.5, top_p=0.9, seed=3, stop_token_ids=(5, 6), min_tokens=2, max_tokens=7,
        num_logprobs=4,
    )  # fmt: skip
    assert request.mode is Mode.SYNC
    assert chat().sampling() == Sampling(temperature=1.0)
    assert complete().sampling() == Sampling(temperature=1.0, max_tokens=16)
    assert chat(stop="a").stops == ("a",)
    assert chat(chat_template_kwargs={"enable_thinking": False}).thinking is False


def test_parts_of_a_message_are_lines_of_one_text() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    [message] = chat(messages=[{"role": "user", "content": parts}]).messages
    assert message.as_dict() == {"role": "user", "content": "a\nb"}


def test_prompts_are_texts_or_token_ids() -> None:
    given = ["a", [1, 2], ["a", "b"], [[1], [2, 3]]]
    prompts = [list(complete(prompt=prompt).prompts) for prompt in given]
    assert prompts == [["a"], [[1, 2]], ["a", "b"], [[1], [2, 3]]]


@pytest.mark.parametrize(
    "fields",
    [
        {"user": "me", "metadata": {"a": "b"}, "store": True},
        {"logit_bias": {}, "tools": [], "response_format": {"type": "text"}, "min_p": 0.0},
        {"tools": None, "reasoning_effort": None, "best_of": 1, "anything": None},
    ],
)
def test_fields_that_change_nothing_are_taken(fields: dict[str, Any]) -> None:
    chat(**fields)
    complete(**fields)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "function"}]}, "tools is not supported"),
        ({"logit_bias": {"5": 1}}, "logit_bias is not supported"),
        ({"min_p": 0.1}, "min_p is not supported"),
        ({"temprature": 0.5}, "did you mean temperature"),
        ({"temperature": "0.5"}, "temperature: Input should be a valid number"),
        ({"seed": 1.5}, "seed"),
        ({"n": 0}, "n: Input should be greater"),
        ({"n": True}, "n: Input should be a valid integer"),
        ({"stop": ["a", ""]}, "must not be empty"),
        ({"stream_options": {"include_usage": True}}, "needs stream=true"),
        ({"return_round": True}, "needs stream=true"),
        ({"mode": "fast"}, "mode"),
        ({"deadline_s": 0}, "deadline_s"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "user"}]}, "messages.0.content: Field required"),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "messages.0"),
        ({"top_logprobs": 2}, "needs logprobs=true"),
        ({"logprobs": True, "top_logprobs": 21}, "top_logprobs"),
    ],
)
def test_bad_chat_requests_are_refused_by_name(fields: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as caught:
        chat(**fields)
    error = from_validation(caught.value.errors())
    assert said in str(error)
    assert error.status == 400


@pytest.mark.parametrize("prompt", [[], [[]] * 33, ["a"] * 33, [1, "a"], [1.5], {"a": 1}, None])
def test_bad_prompts_are_refused(prompt: Any) -> None:
    with pytest.raises(ValidationError):
        complete(prompt=prompt)


def test_tokenize_takes_one_kind_of_prompt() -> None:
    for fields in ({}, {"prompt": "a", "messages": MESSAGES}):
        with pytest.raises(ValidationError, match="either prompt or messages"):
            TokenizeRequest.model_validate(fields)


@pytest.mark.parametrize(
    ("raised", "status", "kind"),
    [
        (ValueError("bad"), 400, "BadRequestError"),
        (OverflowError("full"), 429, "RateLimitError"),
        (VerifierDiedError("died"), 503, "ServiceUnavailableError"),
        (RequestFailedError("nan"), 500, "InternalServerError"),
        (TimeoutError(), 503, "ServiceUnavailableError"),
        (KeyError("secret"), 500, "InternalServerError"),
    ],
)
def test_errors_of_the_engine_have_openai_bodies(raised: Exception, status: int, kind: str) -> None:
    error = to_api_error(raised)
    assert error.body()["error"]["type"] == kind
    assert error.body()["error"]["code"] == error.status == status
    assert ("Retry-After" in error.headers) == (status in (429, 503))
    assert "secret" not in str(error)


@pytest.mark.parametrize("is_included", [False, True])
def test_stop_strings_are_found_however_the_text_is_cut(is_included: bool) -> None:
    rng = random.Random(0)
    num_found = 0
    for _ in range(2000):
        text = "".join(rng.choices("ab", k=rng.randrange(12)))
        stops = ["".join(rng.choices("ab", k=rng.randrange(1, 5))) for _ in range(2)]
        expected, found = text, None
        for end in range(1, len(text) + 1):  # Letter by letter: the definition.
            ended = [stop for stop in stops if text[:end].endswith(stop)]
            if ended:
                found = max(ended, key=len)
                expected = text[: end if is_included else end - len(found)]
                break
        finder, given = StopFinder(stops, is_included=is_included), ""
        rest = text
        while rest:
            size = rng.randrange(1, 4)
            given += finder.push(rest[:size])
            assert expected.startswith(given)
            rest = rest[size:]
        assert (given + finder.finish(), finder.found) == (expected, found)
        num_found += found is not None
    assert 500 < num_found < 2000


def test_only_what_may_begin_a_stop_string_is_held_back() -> None:
    finder = StopFinder(["END."])
    assert [finder.push(piece) for piece in ("an E", "N", "d E", "ND")] == ["an ", "", "ENd ", ""]
    assert finder.finish() == "END"
