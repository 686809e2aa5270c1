"""Streaming text: no character is ever cut, whatever the pieces."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tiny import END, MASK, START, tiny_tokenizer

from d3d_ray.models.text import IncrementalText

TOKENIZER = tiny_tokenizer()
TEXTS = {
    "emoji families": "a 👩‍👩‍👧‍👦 and 👍🏽!",
    "Hangul": "안녕하세요 세계",
    "Devanagari": "नमस्ते दुनिया",
    "mixed": "naïve – “quoted” 日本語 ok",
    "replacement characters of its own": "a\ufffdb\ufffd",
}


def stream(tokens: list[int], sizes: list[int]) -> list[str]:
    """The pieces for chunks of these sizes, in turn until the tokens are used up."""
    text, pieces, start, turn = IncrementalText(TOKENIZER), [], 0, 0
    while start < len(tokens):
        size = sizes[turn % len(sizes)]
        pieces.append(text.push(tokens[start : start + size]))
        start, turn = start + size, turn + 1
    return [*pieces, text.finish()]


@pytest.mark.parametrize("name", TEXTS)
def test_pieces_of_every_size_make_up_the_text(name: str) -> None:
    text = TEXTS[name]
    tokens = TOKENIZER.encode(text)
    assert len(tokens) > len(text), "characters must span tokens"
    for size in range(1, len(tokens) + 1):
        pieces = stream(tokens, [size])
        assert "".join(pieces) == text
        if "\ufffd" not in text:
            assert not any("\ufffd" in piece for piece in pieces)


@settings(deadline=None)
@given(
    tokens=st.lists(st.integers(0, len(TOKENIZER) - 1), max_size=60),
    sizes=st.lists(st.integers(1, 16), min_size=1, max_size=8),
)
def test_random_tokens_in_random_chunks_decode_as_a_whole(
    tokens: list[int], sizes: list[int]
) -> None:
    assert "".join(stream(tokens, sizes)) == TOKENIZER.decode(tokens, skip_special_tokens=True)


def test_text_comes_as_soon_as_its_characters_are_complete() -> None:
    text = IncrementalText(TOKENIZER)
    pieces = [text.push([token]) for token in TOKENIZER.encode("aé👍b")]
    assert pieces == ["a", "", "é", "", "", "", "👍", "b"]
    assert text.finish() == ""


def test_special_tokens_leave_no_trace() -> None:
    tokens = [START, *TOKENIZER.encode("a"), MASK, *TOKENIZER.encode("é"), END]
    assert "".join(stream(tokens, [1])) == "aé"


@pytest.mark.parametrize("broken", ["é", "👍"])
def test_broken_bytes_are_neither_held_back_nor_decoded_again_and_again(broken: str) -> None:
    longest = 0

    class Counting:
        added_tokens_decoder = TOKENIZER.added_tokens_decoder

        def decode(self, tokens: list[int], **options: bool) -> str:
            nonlocal longest
            longest = max(longest, len(tokens))
            return TOKENIZER.decode(tokens, **options)

    tokens = TOKENIZER.encode(broken)[:1] * 300
    text = IncrementalText(Counting())  # type: ignore[arg-type]
    pieces = [text.push([token]) for token in tokens]
    assert len("".join(pieces)) > 250
    assert "".join(pieces) + text.finish() == TOKENIZER.decode(tokens)
    assert longest < 60
