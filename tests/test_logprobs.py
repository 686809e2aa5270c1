"""Log-probabilities are the plain target's, the same in every mode, and change no token."""

from pathlib import Path

import pytest
import torch
from fakes import ToyTarget, right_with_chance
from loops import Results, make_request, run
from scripted_drafter import ScriptedDrafter
from tiny import save_tiny

from d3d_ray.models.loading import load_target
from d3d_ray.records import Sampling, TokenLogprobs

PROMPT = tuple(range(20, 43))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("logprobs")
    save_tiny(path, "qwen3")
    return path


def answer(folder: Path, mode: str, *, prefill_chunk: int = 8, **sampling: object) -> Results:
    target = load_target(str(folder), dtype=torch.float32, device="cpu")
    target.fix_rows(4)
    request = make_request(prompt=PROMPT, mode=mode, max_tokens=24, **sampling)
    drafter = None
    if mode != "ar":
        known = answer(folder, "ar", **sampling).tokens("a")
        drafter = ScriptedDrafter(
            Oracle(known), block_size=4, policy=right_with_chance(0.8), hit_rate=0.5
        )
    return run(target, drafter, [request], vocab_size=512, prefill_chunk=prefill_chunk)


class Oracle(ToyTarget):
    """Knows the answer by heart."""

    def __init__(self, known: tuple[int, ...]) -> None:
        super().__init__(512)
        self._known = dict(enumerate(known))

    def next_token(self, tokens, prompt_length, sampling, stop_ids=frozenset()):
        return self._known.get(len(tokens) - prompt_length, 0)


def rated(results: Results) -> list[TokenLogprobs]:
    return [each for chunk in results.chunks["a"] for each in chunk.logprobs]


def direct(folder: Path, tokens: tuple[int, ...]) -> torch.Tensor:  # [len(tokens), vocab]
    model = load_target(str(folder), dtype=torch.float32, device="cpu").model
    with torch.inference_mode():
        return model(torch.tensor([tokens])).logits[0].log_softmax(dim=-1)


def check(entries: list[TokenLogprobs], rows: torch.Tensor, num_top: int) -> None:
    for entry, row in zip(entries, rows, strict=True):
        assert entry.logprob == pytest.approx(float(row[entry.token]), abs=1e-5)
        best = row.topk(num_top)
        assert [v for _, v in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)
        assert all(float(row[i]) == pytest.approx(v, abs=1e-5) for i, v in entry.top)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.3, "top_k": 4, "seed": 3}], ids=str)
@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
def test_they_are_those_of_one_forward_pass_over_prompt_and_answer(
    folder: Path, mode: str, sampling: dict[str, object]
) -> None:
    results = answer(folder, mode, num_logprobs=5, num_prompt_logprobs=3, **sampling)
    tokens = results.tokens("a")
    rows = direct(folder, (*PROMPT, *tokens))
    assert [each.token for each in rated(results)] == list(tokens)
    check(rated(results), rows[len(PROMPT) - 1 : -1], 5)
    (prefill,) = [c for c in results.chunks["a"] if c.kind == "prefill"]
    first, *others = prefill.prompt_logprobs
    assert first is None and [each.token for each in others] == list(PROMPT[1:])
    check(others, rows[: len(PROMPT) - 1], 3)
    assert all(not c.prompt_logprobs for c in results.chunks["a"] if c is not prefill)


@pytest.mark.parametrize("sampling", [{}, {"temperature": 1.0, "presence_penalty": 1.0}], ids=str)
def test_they_are_the_same_bits_in_every_mode_and_change_no_token(
    folder: Path, sampling: dict[str, object]
) -> None:
    plain = answer(folder, "ar", **sampling)
    expected = answer(folder, "ar", num_logprobs=20, num_prompt_logprobs=20, **sampling)
    assert expected.tokens("a") == plain.tokens("a") and rated(plain) == []
    for mode in ("sync", "async"):
        results = answer(folder, mode, num_logprobs=20, num_prompt_logprobs=20, **sampling)
        assert any(c.num_accepted for c in results.chunks["a"])
        assert rated(results) == rated(expected)
        assert results.chunks["a"][0].prompt_logprobs == expected.chunks["a"][0].prompt_logprobs


def test_how_a_prompt_is_cut_into_chunks_does_not_show(folder: Path) -> None:
    for size in (1, 3, 8, 22, 23, 512):
        results = answer(folder, "ar", prefill_chunk=size, num_prompt_logprobs=0)
        entries = results.chunks["a"][0].prompt_logprobs
        assert len(entries) == len(PROMPT) and all(e.top == () for e in entries if e is not None)


def test_they_are_raw_and_an_answer_cut_short_has_as_many_as_tokens(folder: Path) -> None:
    plain = answer(folder, "ar", num_logprobs=1)
    stop = plain.tokens("a")[9]
    for mode in ("ar", "async"):
        results = answer(folder, mode, num_logprobs=1, stop_token_ids=(stop,), temperature=0.0)
        assert len(rated(results)) == len(results.tokens("a"))
        assert rated(results) == rated(plain)[: len(rated(results))]
    cold, hot = (answer(folder, "ar", num_logprobs=1, temperature=t) for t in (1e-6, 0.0))
    assert rated(cold) == rated(hot)


def test_every_chunk_with_tokens_tells_of_its_round() -> None:
    target = ToyTarget()
    drafter = ScriptedDrafter(target, block_size=4, policy=right_with_chance(0.7), hit_rate=0.5)
    chunks = run(target, drafter, [make_request()]).chunks["a"]
    assert tuple(c.round for c in chunks) == chunks[-1].rounds
    assert all(c.round and c.round.num_emitted == len(c.tokens) for c in chunks)


@pytest.mark.parametrize("name", ["num_logprobs", "num_prompt_logprobs"])
@pytest.mark.parametrize("value", [-1, 21, 1.5, True, "3"])
def test_a_bad_number_is_refused_by_name(name: str, value: object) -> None:
    with pytest.raises(ValueError, match=name):
        Sampling(**{name: value})  # type: ignore[arg-type]
