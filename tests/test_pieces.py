"""The text of an answer, however it was cut into blocks."""

import random

import pytest
from tiny import END, tiny_tokenizer

from d3d_ray.records import Chunk, Finish, TokenLogprobs
from d3d_ray.serving.errors import ApiError
from d3d_ray.serving.pieces import AnswerText, Piece

TOKENIZER = tiny_tokenizer()
TEXT = "naïve 🙂 text, then STOP and more"


def read(tokens: list[int], sizes: list[int], finish: Finish, **options: object) -> list[Piece]:
    """Pieces up to the one that ends the answer, of blocks with these sizes."""
    answer, pieces, start = AnswerText(TOKENIZER, **options), [], 0  # type: ignore[arg-type]
    for size in sizes:
        part, start = tokens[start : start + size], start + size
        logprobs = tuple(TokenLogprobs(token, -1.0, ()) for token in part)
        end = finish if start >= len(tokens) else None
        pieces.append(answer.push(Chunk("r", tuple(part), finish=end, logprobs=logprobs)))
        if pieces[-1].finish is not None:
            break
    return pieces


def cut(length: int, rng: random.Random) -> list[int]:
    sizes = []
    while sum(sizes) < length:
        sizes.append(rng.randrange(1, 9))
    return sizes


@pytest.mark.parametrize("stops", [(), ("STOP",), ("🙂",), ("xt, then S", "never"), ("more!",)])
@pytest.mark.parametrize("is_included", [False, True])
def test_pieces_do_not_depend_on_the_blocks(stops: tuple[str, ...], is_included: bool) -> None:
    tokens = [*TOKENIZER.encode(TEXT), END]
    rng, seen = random.Random(1), set()
    for sizes in [[1] * len(tokens), [len(tokens)], *(cut(len(tokens), rng) for _ in range(50))]:
        pieces = read(tokens, sizes, Finish.STOP, stops=stops, is_stop_included=is_included)
        taken = tuple(token for piece in pieces for token in piece.tokens)
        assert all(len(piece.logprobs) == len(piece.tokens) for piece in pieces)
        last = pieces[-1]
        seen.add(("".join(p.text for p in pieces), taken, last.finish, last.stop_reason))
    [(text, taken, finish, reason)] = seen
    found = [stop for stop in stops if stop in TEXT]
    end = TEXT.index(found[0]) + len(found[0]) * is_included if found else len(TEXT)
    assert (text, finish) == (TEXT[:end], "stop")
    assert reason == (found[0] if found else END)
    assert TOKENIZER.decode(taken).startswith(TEXT[:end])
    assert (taken == tuple(tokens)) == (not found)


def test_an_answer_that_is_cut_off_gives_out_what_was_held_back() -> None:
    tokens = TOKENIZER.encode("a smile 🙂")[:-1]
    pieces = read(tokens, [1] * len(tokens), Finish.LENGTH, stops=["\ufffdx"])
    assert "".join(piece.text for piece in pieces) == "a smile \ufffd"
    assert all("\ufffd" not in piece.text for piece in pieces[:-1])
    assert (pieces[-1].finish, pieces[-1].stop_reason) == ("length", None)


def test_stop_strings_wait_for_min_tokens() -> None:
    tokens = TOKENIZER.encode("ab ab ab")
    first = TOKENIZER.encode("ab ")
    pieces = read(tokens, [3] * 9, Finish.LENGTH, stops=["b"], min_tokens=len(first) + 1)
    assert "".join(piece.text for piece in pieces) == "ab a"


def test_a_cancelled_answer_is_an_error() -> None:
    chunk = Chunk("r", (), finish=Finish.CANCELLED, error="the deadline of 3 s has passed")
    with pytest.raises(ApiError, match="deadline of 3 s") as caught:
        AnswerText(TOKENIZER).push(chunk)
    assert caught.value.status == 504
