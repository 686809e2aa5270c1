"""From what a user writes to token ids."""

import pytest
from tiny import tiny_tokenizer

from d3d_ray.models.chat import render_chat
from d3d_ray.records import Sampling
from d3d_ray.runtime.prompts import check_tokens, encode

MESSAGES = [{"role": "user", "content": "hi"}]


def test_thinking_reaches_the_chat_template_and_is_refused_without_a_mode() -> None:
    tokenizer = tiny_tokenizer()
    with pytest.raises(ValueError, match=r"no thinking mode.*target\.enable_thinking at null"):
        encode(tokenizer, MESSAGES, thinking=False)
    plain = tokenizer.decode(encode(tokenizer, MESSAGES))
    assert isinstance(tokenizer.chat_template, str)
    tokenizer.chat_template += "{% if enable_thinking is false %}<none>{% endif %}"
    texts = [
        tokenizer.decode(encode(tokenizer, MESSAGES, thinking=mode)) for mode in (None, True, False)
    ]
    assert texts == [plain, plain, f"{plain}<none>"]
    assert encode(tokenizer, "hi", thinking=False) == encode(tokenizer, "hi")


def test_a_template_that_is_missing_or_refuses_is_bad_input() -> None:
    tokenizer = tiny_tokenizer()
    tokenizer.chat_template = "{{ raise_exception('roles must take turns') }}"
    with pytest.raises(ValueError, match="refuses these messages: roles must take turns"):
        render_chat(tokenizer, MESSAGES)
    tokenizer.chat_template = None
    with pytest.raises(ValueError, match="use an instruction model"):
        render_chat(tokenizer, MESSAGES)


def test_an_answer_that_may_not_stop_needs_a_token_that_does_not_stop_it() -> None:
    def check(num_stops: int, min_tokens: int) -> None:
        sampling = Sampling(min_tokens=min_tokens)
        check_tokens([5], sampling, frozenset(range(num_stops)), 8, 100)

    check(8, 0)
    check(7, 1)
    with pytest.raises(ValueError, match="min_tokens is 1: set it to 0"):
        check(8, 1)
