"""Answers of a real engine in pieces, as the routes ask for them."""

import asyncio
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_runtime import make_config
from tiny import save_tiny

from d3d_ray.records import Mode, Sampling
from d3d_ray.runtime.engine import Engine
from d3d_ray.serving.errors import ApiError
from d3d_ray.serving.protocol import ChatRequest, CompletionRequest
from d3d_ray.serving.service import Service, gather

pytestmark = [pytest.mark.ray, pytest.mark.usefixtures("ray_cluster")]


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    folder = tmp_path_factory.mktemp("tiny")
    save_tiny(folder, "qwen3")
    with Engine(make_config(folder)) as engine:
        yield Service(engine)


async def answer(service: Service, **fields: Any) -> list[tuple[str, list[int], str | None]]:
    """Text, token ids and reason of the end of each choice."""
    defaults = {"prompt": "hello", "temperature": 0, "max_tokens": 40, "ignore_eos": True}
    request = CompletionRequest.model_validate(defaults | fields)
    prompts = service.encode(request)
    num_choices = len(prompts) * request.num_choices
    choices = await gather(service.answer(request, prompts), num_choices)
    return [
        (
            "".join(piece.text for piece in pieces),
            [token for piece in pieces for token in piece.tokens],
            pieces[-1].finish,
        )
        for pieces in choices
    ]


def test_greedy_answers_equal_plain_decoding_alone_and_in_company(service: Service) -> None:
    prompts = ["hello", "the cat sat", "x", "some other words"]
    sampling = Sampling(max_tokens=40, ignore_eos=True)
    plain = service.engine.generate(prompts, sampling, mode=Mode.AR)
    expected = [(a.text, list(a.tokens), "length") for a in plain]
    assert asyncio.run(answer(service, prompt=prompts)) == expected
    alone = [asyncio.run(answer(service, prompt=prompt)) for prompt in prompts]
    assert [each for [each] in alone] == expected


def test_choices_differ_and_a_seed_repeats_them(service: Service) -> None:
    def draw(**fields: Any) -> Any:
        return asyncio.run(answer(service, temperature=1, max_tokens=12, **fields))

    three = draw(n=3, seed=5)
    assert len({text for text, _, _ in three}) == 3
    assert draw(n=3, seed=5) == three
    assert draw(seed=5) == three[:1]
    assert draw(prompt=["x", "hello"], n=3, seed=5)[3:] == three


def test_a_stop_string_ends_the_answer_and_the_work_on_it(service: Service) -> None:
    [(text, tokens, _)] = asyncio.run(answer(service))
    stop = text[9:12]
    end = text.index(stop)
    [(cut, taken, finish)] = asyncio.run(answer(service, stop=stop, max_tokens=900))
    assert (cut, finish) == (text[:end], "stop")
    assert taken == tokens[: len(taken)]
    wait_until_idle(service)


def test_a_reader_that_leaves_stops_all_choices(service: Service) -> None:
    async def leave() -> None:
        request = CompletionRequest(prompt="hello", n=4, max_tokens=900, ignore_eos=True)
        pieces = service.answer(request, service.encode(request))
        await anext(pieces)
        await pieces.aclose()

    asyncio.run(leave())
    wait_until_idle(service)


def wait_until_idle(service: Service) -> None:
    until = time.monotonic() + 2
    while time.monotonic() < until:
        counters = service.engine.counters()
        if counters["running"] == counters["waiting"] == 0:
            return
        time.sleep(0.05)
    pytest.fail(f"still at work after 2 s: {counters}")


def test_one_bad_choice_ends_the_others(service: Service) -> None:
    with pytest.raises(ApiError, match="deadline"):
        asyncio.run(answer(service, n=3, max_tokens=900, deadline_s=0.05))
    wait_until_idle(service)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"prompt": "x" * 5000}, "context limit"),
        ({"prompt": [1, 99999]}, "outside the vocabulary"),
        ({"prompt": ""}, "empty"),
        ({"prompt": "\ud800"}, "no valid text"),
        ({"temperature": -1}, "temperature"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"min_tokens": 50}, "min_tokens"),
    ],
)
def test_bad_values_are_refused_before_anything_is_decoded(
    service: Service, fields: dict[str, Any], said: str
) -> None:
    rounds = service.engine.counters()["rounds"]
    with pytest.raises(ValueError, match=said):
        asyncio.run(answer(service, **fields))
    assert service.engine.counters()["rounds"] == rounds


def test_chat_goes_through_the_template(service: Service) -> None:
    messages = [{"role": "user", "content": "Hi"}]
    request = ChatRequest.model_validate({"messages": messages})
    [tokens] = service.encode(request)
    assert service.engine.tokenizer.decode(tokens) == (
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    thinking = ChatRequest.model_validate(
        {"messages": messages, "chat_template_kwargs": {"enable_thinking": True}}
    )
    with pytest.raises(ValueError, match="no thinking mode"):
        service.encode(thinking)


def test_only_the_served_model_is_known(service: Service) -> None:
    service.check_model(None)
    service.check_model(service.model)
    with pytest.raises(ApiError, match="no model 'gpt'"):
        service.check_model("gpt")
