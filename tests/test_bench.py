"""The benchmark without Ray: prompts, identity, near-ties, tables, JSON, traces and timelines."""

import contextlib
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fakes import ToyTarget
from matplotlib.image import imread

from d3d_ray.bench import compare as compare_module
from d3d_ray.bench.compare import compare
from d3d_ray.bench.near_ties import Difference, find_difference, judge, measure_gap
from d3d_ray.bench.options import parse_options
from d3d_ray.bench.prompts import NamedPrompt, make_prompt, read_prompts
from d3d_ray.bench.report import Comparison
from d3d_ray.bench.timeline import choose_window, draw_timeline
from d3d_ray.bench.trace import make_events, write_trace
from d3d_ray.config import from_dict
from d3d_ray.decode.rescoring import Candidate, find_top_two
from d3d_ray.metrics import Summary
from d3d_ray.records import Finish, Mode, Request, Round, Sampling

MS = 1_000_000
TWO_PROMPTS = [NamedPrompt(id="a", text="one"), NamedPrompt(id="b", text="two")]


def make_round(epoch: int, *, request: str = "r", kind: str = "hit", **fields: Any) -> Round:
    """Rounds of 10 ms, each drafted for during the one before."""
    start = 10 * MS * epoch
    has_drafts = kind != "none" and epoch > 0
    times = {
        "verify_start_ns": start,
        "verify_end_ns": start + 9 * MS,
        "draft_start_ns": start - 9 * MS if has_drafts else 0,
        "draft_end_ns": start - 3 * MS if has_drafts else 0,
    }
    counts = {"num_drafts": 3, "num_accepted": 1, "num_emitted": 2}
    is_prefill = epoch == 0
    return Round(
        request=request,
        epoch=epoch,
        kind="prefill" if is_prefill else kind,
        is_prefill=is_prefill,
        **{**counts, **times, **fields},
    )


def make_rounds(num_rounds: int, **fields: Any) -> list[Round]:
    return [make_round(epoch, **fields) for epoch in range(num_rounds + 1)]


def make_config(**decode: Any) -> Any:
    target = {"source": "x", "dtype": "float32"}
    return from_dict({"name": "tiny", "target": target, "decode": decode})


def make_comparison(**fields: Any) -> Comparison:
    rounds = {
        Mode.AR: make_rounds(6, kind="none", num_emitted=1),
        Mode.ASYNC: make_rounds(6),
    }
    settings = {
        "config": make_config(),
        "sampling": Sampling(seed=1),
        "is_drafter_trained": True,
        "num_prompts": 1,
        "rounds": rounds,
    }
    return Comparison(**{**settings, **fields})


def make_difference(*, is_near_tie: bool, gap_units: float | None = 0.5) -> Difference:
    return Difference(
        prompt="a",
        mode="async",
        position=3,
        expected=7,
        found=8,
        gap_units=gap_units,
        is_near_tie=is_near_tie,
    )


class FakeEngine:
    """Answers with the tokens it is told to; a mode and a prompt's text choose them."""

    def __init__(self, answer: Callable[[str, Mode], Sequence[int]], dtype: str) -> None:
        self._answer = answer
        config = make_config()
        self.config = replace(config, target=replace(config.target, dtype=dtype))
        self.supervisor = SimpleNamespace(
            drafter_info=SimpleNamespace(is_trained=False), verifier_info=None
        )
        self.calls: list[tuple[str, Mode, Sampling]] = []

    def generate(self, prompts: Any, sampling: Sampling, *, mode: Mode) -> list[Any]:
        ((message,),) = prompts
        text = message["content"]
        self.calls.append((text, mode, sampling))
        rounds = tuple(make_rounds(3, request=f"{text}-{mode}-{len(self.calls)}"))
        tokens = tuple(self._answer(text, mode))
        return [SimpleNamespace(tokens=tokens, rounds=rounds, finish=Finish.LENGTH)]


# --- prompts ---


def test_only_the_first_turn_is_asked(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "turns": ["first", "second"]}\n{"id": 2, "turns": ["ä"]}\n')
    prompts = read_prompts(file)
    assert [prompt.id for prompt in prompts] == ["a", "2"]
    assert prompts[0].messages == [{"role": "user", "content": "first"}]
    assert prompts[1].text == "ä"


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "[]",
        '"text"',
        '{"turns": ["x"]}',
        '{"id": "a"}',
        '{"id": "a", "turns": []}',
        '{"id": "a", "turns": "x"}',
        '{"id": "a", "turns": [" "]}',
        '{"id": "a", "turns": [1]}',
    ],
)
def test_a_bad_line_is_refused_with_file_and_number(tmp_path: Path, line: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"id": "a", "turns": ["fine"]}\n' + line + "\n")
    with pytest.raises(ValueError, match=r"prompts\.jsonl:2"):
        read_prompts(file)


def test_a_line_separator_within_a_question_does_not_split_the_line(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('\ufeff{"id": "a", "turns": ["one\u2028two"]}\n', encoding="utf-8")
    assert [prompt.text for prompt in read_prompts(file)] == ["one\u2028two"]


def test_a_missing_or_empty_file_and_an_empty_prompt_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="cannot be read"):
        read_prompts(tmp_path / "missing.jsonl")
    (tmp_path / "empty.jsonl").touch()
    with pytest.raises(ValueError, match="empty"):
        read_prompts(tmp_path / "empty.jsonl")
    with pytest.raises(ValueError, match="empty"):
        make_prompt(" \n")


# --- identity and near-ties ---


@pytest.mark.parametrize(
    ("expected", "found", "position"),
    [
        ([1, 2, 3], [1, 2, 3], None),
        ([1, 2, 3], [1, 9, 3], 1),
        ([1, 2, 3], [1, 2], 2),
        ([1, 2], [1, 2, 3], 2),
        ([], [], None),
    ],
)
def test_the_first_difference_is_found(
    expected: list[int], found: list[int], position: int | None
) -> None:
    assert find_difference(expected, found) == position


def judge_pair(
    top_two: tuple[Candidate, Candidate], *, dtype: torch.dtype = torch.bfloat16, **sampling: Any
) -> Difference | None:
    """Plain decoding said 1 2 3, the other mode 1 2 4."""
    prefixes: list[Sequence[int]] = []

    def find(output: Sequence[int]) -> tuple[Candidate, Candidate]:
        prefixes.append(output)
        return top_two

    difference = judge(
        [1, 2, 3],
        [1, 2, 4],
        prompt="a",
        mode="sync",
        dtype=dtype,
        sampling=Sampling(**sampling),
        find_top_two=find,
    )
    assert prefixes == ([] if dtype == torch.float32 else [[1, 2]])
    return difference


def candidates(gap: float, tokens: tuple[int, int] = (4, 3), logit: float = 20.0) -> Any:
    first, second = tokens
    return (
        Candidate(token=first, logit=logit, score=logit),
        Candidate(token=second, logit=logit - gap, score=logit - gap),
    )


def test_a_gap_within_two_units_is_a_near_tie() -> None:
    # The unit of bfloat16 between 16 and 32 is 1/8.
    assert judge_pair(candidates(0.25)) == Difference(
        prompt="a", mode="sync", position=2, expected=3, found=4, gap_units=2.0, is_near_tie=True
    )


@pytest.mark.parametrize(
    ("top_two", "dtype"),
    [
        (candidates(0.375), torch.bfloat16),
        (candidates(0.0, tokens=(4, 5)), torch.bfloat16),
        (candidates(0.25), torch.float16),
        (candidates(0.0), torch.float32),
    ],
    ids=["gap too large", "another token", "finer type", "float32"],
)
def test_every_other_difference_is_a_violation(top_two: Any, dtype: torch.dtype) -> None:
    difference = judge_pair(top_two, dtype=dtype)
    assert difference is not None
    assert not difference.is_near_tie


def test_an_answer_that_goes_on_behind_the_end_is_a_violation() -> None:
    difference = judge(
        [1, 2],
        [1, 2, 3],
        prompt="a",
        mode="sync",
        dtype=torch.bfloat16,
        sampling=Sampling(),
        find_top_two=lambda output: candidates(0.0),
    )
    assert difference is not None
    assert (difference.expected, difference.found, difference.is_near_tie) == (None, 3, False)


def test_the_gap_of_perturbed_scores_is_measured_in_logits() -> None:
    first, second = candidates(1.0)
    half = Sampling(temperature=0.5)
    gap = measure_gap(first, second, dtype=torch.bfloat16, sampling=Sampling())
    assert gap == 8.0
    assert measure_gap(first, second, dtype=torch.bfloat16, sampling=half) == 4.0


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(temperature=1.0, top_k=8, seed=3)])
def test_the_best_candidate_is_what_plain_decoding_draws(sampling: Sampling) -> None:
    target, prompt = ToyTarget(sees_all=True), (3, 1, 4)
    answer = target.plain_answer(prompt, sampling, max_tokens=12)
    request = Request(id="r", prompt=prompt, sampling=sampling, max_tokens=12)
    for position in range(12):
        first, second = find_top_two(target, request, answer[:position])
        assert first.token == answer[position]
        assert second.token != first.token
        assert first.score >= second.score
    assert target.cached == {}, "nothing is left in the caches"


# --- comparing ---


def test_the_modes_take_turns_and_the_warm_up_is_not_counted() -> None:
    engine = FakeEngine(lambda text, mode: (1, 2, 3), "float32")
    result = compare(engine, TWO_PROMPTS, Sampling(temperature=1.0))  # type: ignore[arg-type]
    asked = [(text, mode) for text, mode, _ in engine.calls]
    modes = [Mode.AR, Mode.SYNC, Mode.ASYNC]
    assert asked == [(text, mode) for text in ("one", "one", "two") for mode in modes]
    warm_ups, counted = engine.calls[:3], engine.calls[3:]
    assert all(sampling.max_tokens == 4 for _, _, sampling in warm_ups)
    (seed,) = {sampling.seed for _, _, sampling in counted}
    assert seed is not None, "the modes must share one seed"
    assert {len(rounds) for rounds in result.rounds.values()} == {2 * 4}
    assert result.num_identical == 2
    assert "identical: 2 of 2 prompts, token for token" in result.table()
    assert result.to_json()["identical"] is True


def test_speed_ups_are_over_plain_decoding_with_all_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(lambda text, mode: (1, 2, 3), "float32")
    held: list[int] = []

    @contextlib.contextmanager
    def all_cores(engine: FakeEngine) -> Iterator[None]:
        held.append(len(engine.calls))
        yield
        assert len(engine.calls) == held[-1] + 1

    monkeypatch.setattr(compare_module, "_count_cores", lambda engine: (1, 1))
    monkeypatch.setattr(compare_module, "_all_cores", all_cores)
    result = compare(engine, TWO_PROMPTS, Sampling())  # type: ignore[arg-type]
    assert len(held) == 2 and {m: len(r) for m, r in result.all_cores.items()} == {Mode.AR: 2 * 4}
    times = ("verify_start_ns", "verify_end_ns")
    slow = result.all_cores[Mode.AR]
    faster = [replace(r, **{t: getattr(r, t) // 2 for t in times}) for r in slow]
    result = replace(result, all_cores={Mode.AR: faster})
    plain = result.summaries[Mode.AR].tokens_per_second
    assert result.plain.tokens_per_second > plain
    speed_up = result.speed_up(Mode.AR)
    assert speed_up == plain / result.plain.tokens_per_second
    rows = {line.split("  ")[0]: line for line in result.table().splitlines()}
    assert "1.00x" in rows["ar, all cores"] and f"{speed_up:.2f}x" in rows["ar"]


def test_one_wrong_token_in_float32_is_a_violation() -> None:
    def answer(text: str, mode: Mode) -> Sequence[int]:
        return (1, 2, 9) if (text, mode) == ("two", Mode.ASYNC) else (1, 2, 3)

    result = compare(FakeEngine(answer, "float32"), TWO_PROMPTS, Sampling())  # type: ignore[arg-type]
    assert (result.num_identical, result.num_near_ties, result.num_violations) == (1, 0, 1)
    assert result.to_json()["identical"] is False
    assert "identical" not in result.table()
    assert "b, async: output token 2 is 9, plain decoding has 3: VIOLATION" in result.table()


def test_near_ties_in_bfloat16_are_counted_and_are_not_called_identical(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(
        compare_module, "_ask_target", lambda *_: lambda output: candidates(0.0, tokens=(3, 9))
    )

    def answer(text: str, mode: Mode) -> Sequence[int]:
        return (1, 2, 9) if mode is not Mode.AR and text == "one" else (1, 2, 3)

    engine = FakeEngine(answer, "bfloat16")
    result = compare(engine, TWO_PROMPTS, Sampling())  # type: ignore[arg-type]
    assert (result.num_identical, result.num_near_ties, result.num_violations) == (1, 2, 0)
    assert result.to_json()["identical"] is False
    assert "identical" not in result.table()
    assert "near-ties: 2, violations: 0" in result.table()


def test_a_single_mode_claims_nothing_about_identity() -> None:
    engine = FakeEngine(lambda text, mode: (1, 2), "float32")
    result = compare(engine, TWO_PROMPTS, Sampling(), modes=[Mode.ASYNC])  # type: ignore[arg-type]
    assert result.to_json()["identical"] is None
    assert "identical" not in result.table()


# --- reporting ---


def test_the_json_holds_every_figure_under_its_name() -> None:
    data = json.loads(json.dumps(make_comparison().to_json()))
    assert set(data) == {
        *("label", "preset", "dtype", "drafter_trained", "simulated", "identical"),
        *(
            "num_prompts",
            "num_identical",
            "num_near_ties",
            "num_violations",
            "plain_with_all_cores",
            "dflash_with_all_cores",
            "differences",
        ),
        *("modes", "sampling", "settings", "versions", "machine", "date", "commit", "command"),
    }
    assert set(data["modes"]) == {"ar", "async"}
    for figures in data["modes"].values():
        assert set(figures) == {"label", "speed_up", *Summary.__dataclass_fields__}
    assert data["modes"]["async"]["tokens_per_second"] == pytest.approx(200.0)
    assert data["modes"]["async"]["acceptance_length"] == 2.0
    assert data["modes"]["async"]["speed_up"] == pytest.approx(2.0)
    assert data["settings"]["target"]["dtype"] == data["dtype"] == "float32"
    assert set(data["versions"]) == {"python", "torch", "ray", "transformers"}
    assert set(data["machine"]) == {"cpu", "cores", "gpus"}
    assert data["simulated"] is None


def test_the_table_has_a_row_a_mode_and_a_speed_up() -> None:
    title, head, plain, drafted, verdict = make_comparison().table().splitlines()
    assert title == "tiny, target float32, prompts 1"
    names = ["tokens/s", "speed-up", "acceptance length", "hit", "soft", "none"]
    names += ["T_verify", "T_draft", "T_hop", "bubble", "efficiency"]
    assert [head.index(name) for name in names] == sorted(head.index(name) for name in names)
    assert plain.split()[:4] == ["ar", "100.0", "1.00x", "1.00"]
    assert drafted.split()[:4] == ["async", "200.0", "2.00x", "2.00"]
    assert "remark" not in head
    assert [plain.split().count("–"), drafted.split().count("–")] == [3, 0]
    assert verdict == "identical: 1 of 1 prompts, token for token"


def test_simulated_figures_say_so_and_show_no_speed_up() -> None:
    result = make_comparison(config=make_config(simulate_acceptance=0.8))
    title, head, _, drafted, _ = result.table().splitlines()
    assert "SIMULATED acceptance 0.8" in title
    assert "SIMULATED acceptance 0.8" in drafted
    assert "speed-up" not in head
    assert "SIMULATED" in result.line(Mode.ASYNC)
    data = result.to_json()
    assert data["simulated"] == 0.8
    assert "SIMULATED" in data["label"]
    assert "SIMULATED" in data["modes"]["async"]["label"]
    assert {figures["speed_up"] for figures in data["modes"].values()} == {None}


def test_an_untrained_drafter_is_named_on_its_lines_alone() -> None:
    result = make_comparison(is_drafter_trained=False)
    title, head, plain, drafted, _ = result.table().splitlines()
    assert drafted.index("untrained drafter") == head.index("remark")
    assert "untrained drafter" in title
    assert "untrained drafter" in drafted
    assert "untrained drafter" not in plain
    assert "untrained drafter" in result.line(Mode.ASYNC)
    assert result.to_json()["drafter_trained"] is False


def test_wrong_answers_have_no_speed_up() -> None:
    wrong = make_comparison(differences=[make_difference(is_near_tie=False)])
    assert "speed-up" not in wrong.table()
    assert wrong.speed_up(Mode.ASYNC) is None
    near = make_comparison(differences=[make_difference(is_near_tie=True)])
    assert near.speed_up(Mode.ASYNC) == pytest.approx(2.0)


# --- trace and timeline ---


def test_the_trace_has_two_lanes_and_a_span_a_verification_and_a_drafting(tmp_path: Path) -> None:
    rounds = [*make_rounds(3), make_round(4, kind="none")]
    write_trace(tmp_path / "t.json", {Mode.ASYNC: rounds}, label="SIMULATED acceptance 0.5")
    trace = json.loads((tmp_path / "t.json").read_text())
    spans = [event for event in trace["traceEvents"] if event["ph"] == "X"]
    lanes = {
        event["tid"]: event["args"]["name"]
        for event in trace["traceEvents"]
        if event["name"] == "thread_name"
    }
    by_lane: dict[str, list[str]] = {"verifier": [], "drafter": []}
    for span in spans:
        by_lane[lanes[span["tid"]]].append(span["name"])
    assert by_lane["verifier"] == ["prefill", "verify 1", "verify 2", "verify 3", "verify 4"]
    assert by_lane["drafter"] == ["draft for 1", "draft for 2", "draft for 3"]
    (verify_2,) = (span for span in spans if span["name"] == "verify 2")
    (draft_2,) = (span for span in spans if span["name"] == "draft for 2")
    assert (verify_2["ts"], verify_2["dur"]) == (20_000.0, 9_000.0)
    assert (draft_2["ts"], draft_2["dur"]) == (11_000.0, 6_000.0)
    args = {"request": "r", "epoch": 2, "k": 1, "kind": "hit", "drafts": 3}
    assert args.items() <= verify_2["args"].items()
    assert args.items() <= draft_2["args"].items()
    assert "SIMULATED" in trace["traceEvents"][0]["args"]["name"]


def test_plain_decoding_is_not_labelled_with_its_drafter_in_the_trace() -> None:
    events = make_events({mode: make_rounds(1) for mode in Mode}, label="untrained drafter")
    names = [e["args"]["name"] for e in events if e["name"] == "process_name"]
    assert names == ["ar", "sync (untrained drafter)", "async (untrained drafter)", "dflash"]


def test_a_trace_of_nothing_is_still_a_trace() -> None:
    assert [event["ph"] for event in make_events({Mode.AR: []})] == ["M"] * 5


def test_the_window_is_the_middle_of_the_longest_answer() -> None:
    rounds = [*make_rounds(3, request="short"), *make_rounds(20, request="long")]
    window = choose_window(rounds, 10)
    assert {r.request for r in window} == {"long"}
    assert [r.epoch for r in window] == list(range(6, 16))
    assert [r.epoch for r in choose_window(make_rounds(4), 10)] == [1, 2, 3, 4]


@pytest.mark.parametrize("num_rounds", [1, 2, 30])
def test_the_timeline_is_a_picture_of_1200_by_400(tmp_path: Path, num_rounds: int) -> None:
    rounds = [
        make_round(epoch, kind=("hit", "soft", "none")[epoch % 3])
        for epoch in range(num_rounds + 1)
    ]
    draw_timeline(tmp_path / "t.png", rounds, title="SIMULATED")
    image = imread(tmp_path / "t.png")
    assert image.shape[:2] == (400, 1200)
    assert image.std() > 0.05, "the picture is empty"


def test_a_timeline_without_rounds_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="more than one token"):
        draw_timeline(tmp_path / "t.png", make_rounds(0), title="")


# --- the command line ---


def test_flags_and_overrides_become_settings() -> None:
    options = parse_options(
        [
            *("decode.max_wait_ms=7", "--mode", "compare", "--dtype", "float32", "--top-k", "5"),
            *("--set", "drafter.num_layers=3", "drafter.block_size=5"),
            *("--simulate-acceptance", "0.5"),
        ]
    )
    config = options.config
    assert (config.decode.max_wait_ms, config.target.dtype) == (7, "float32")
    assert (config.drafter.num_layers, config.drafter.block_size) == (3, 5)
    assert (config.decode.mode, config.decode.simulate_acceptance) == ("async", 0.5)
    assert options.modes == (Mode.AR, Mode.SYNC, Mode.ASYNC)
    assert options.sampling.top_k == 5
    assert len(options.prompts) == 1


@pytest.mark.parametrize("mode", ["ar", "sync", "async"])
def test_a_mode_is_that_of_the_engine(mode: str) -> None:
    options = parse_options(["--mode", mode])
    assert options.modes == (Mode(mode),)
    assert options.config.decode.mode == mode
    assert parse_options([f"decode.mode={mode}"]).modes == (Mode(mode),)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--preset", "nope"],
        ["--prompts", "missing.jsonl"],
        ["--prompt", ""],
        ["--prompt", "x", "--prompts", "y"],
        ["--mode", "fast"],
        ["--nope"],
        ["--max-tokens", "0"],
        ["--max-tokens", "x"],
        ["--temperature", "nan"],
        ["--simulate-acceptance", "2"],
        ["--json", "no/such/folder/out.json"],
        ["--timeline", "/"],
        ["decode.mod=sync"],
        ["--set", "decode.mode"],
    ],
)
def test_bad_arguments_are_a_value_error(arguments: list[str]) -> None:
    with pytest.raises(ValueError):
        parse_options(arguments)
