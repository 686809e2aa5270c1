"""A table and a picture of a run, drawn anew after every depth."""

import math
from pathlib import Path

from d3d_ray.pruning.anchors import tokens
from d3d_ray.pruning.config import PruningConfig
from d3d_ray.pruning.estimates import Estimate, ratio
from d3d_ray.pruning.state import Depth, State
from d3d_ray.pruning.stopping import share_kept

_COLUMNS = (
    "layers",
    "removed",
    "before healing",
    "healed",
    "control",
    "kept of unpruned",
    "kept of control",
    "known anchor",
    "masks alone",
    "next token",
    "T_draft, ms",
)


def write_report(config: PruningConfig, state: State) -> None:
    folder = Path(config.output)
    (folder / "pruning.md").write_text(make_report(config, state), encoding="utf-8")
    draw(state, folder / "pruning.png")


def make_report(config: PruningConfig, state: State) -> str:
    """Markdown: what was done, and a line a depth."""
    optimiser, blocks = config.optimiser, tokens(state.counts)
    num_rows = optimiser.accumulation * config.num_workers
    lines = [
        f"# Pruning of {config.drafter}",
        "",
        f"Acceptance lengths, teacher-forced, at {sum(blocks)} places of {len(blocks)} documents "
        "held out, the same in every line; ± is the standard error, with the documents as "
        f"clusters. A share of {config.anchors.seeded_share:g} of the places has a known token at "
        "the first slot; layers are judged by all of them.",
        "",
        f"Healing: {optimiser.num_steps} steps of {num_rows} rows a line, learning rate "
        f"{optimiser.learning_rate:g}. Control: the unpruned drafter after the same training.",
        "",
        f"| {' | '.join(_COLUMNS)} |",
        f"|{'---|' * len(_COLUMNS)}",
        *(f"| {' | '.join(_cells(depth, state))} |" for depth in state.depths),
        "",
    ]
    if state.chosen is not None:
        lines += [f"The result in `drafter/` has **{state.chosen} layers**.", ""]
    return "\n".join(lines)


def describe(depth: Depth, state: State) -> str:
    """One line for the log."""
    return ", ".join(
        f"{name} {cell}"
        for name, cell in zip(_COLUMNS, _cells(depth, state), strict=True)
        if cell != "–"
    )


def draw(state: State, picture: Path) -> None:
    """Depth against acceptance length, and against the time of a packed pass."""
    from matplotlib.figure import Figure

    depths, counts = state.depths, tokens(state.counts)
    figure = Figure(figsize=(11, 4), layout="constrained")
    lengths, times = figure.subplots(1, 2)
    series = {
        "healed": [(d.num_layers, d.healed) for d in depths],
        "before healing": [(d.num_layers, d.unhealed) for d in depths[1:]],
        "unpruned, same training": [(d.num_layers, d.control) for d in depths if d.control],
    }
    for (name, points), line in zip(series.items(), ("o-", "x", "s--"), strict=True):
        estimates = [ratio(tokens(tally), counts) for _, tally in points]
        lengths.errorbar(
            [num_layers for num_layers, _ in points],
            [estimate.value for estimate in estimates],
            [estimate.error for estimate in estimates],
            fmt=line,
            label=name,
            markersize=4,
            linewidth=1,
            capsize=2,
        )
    times.plot([d.num_layers for d in depths], [d.pass_ms for d in depths], "o-", markersize=4)
    lengths.set(ylabel="tokens a round", title="acceptance length, teacher-forced")
    times.set(ylabel="ms", title="T_draft, one packed pass", ylim=(0, None))
    lengths.legend()
    for axes in (lengths, times):
        axes.set(xlabel="layers left")
        axes.xaxis.get_major_locator().set_params(integer=True)
        axes.invert_xaxis()
        axes.grid(alpha=0.3)
        if state.chosen is not None:
            axes.axvline(state.chosen, color="grey", linewidth=0.8)
    figure.savefig(picture, dpi=110)


def _cells(depth: Depth, state: State) -> list[str]:
    healed, control, counts = depth.healed, depth.control, state.counts
    is_pruned = depth is not state.depths[0]
    nothing = Estimate(math.nan, math.nan)
    lengths = [
        ratio(tokens(depth.unhealed), tokens(counts)) if is_pruned else nothing,
        ratio(tokens(healed), tokens(counts)),
        ratio(tokens(control), tokens(counts)) if control else nothing,
    ]
    shares = [
        share_kept(depth, state.depths[0]) if is_pruned else nothing,
        ratio(tokens(healed), tokens(control)) if control and is_pruned else nothing,
    ]
    kinds = [
        ratio(healed["known_anchor"], counts["known_anchor"]),
        ratio(healed["mask_first"], counts["mask_first"]),
    ]
    accuracy = ratio(healed["next_token"], counts["next_token"])
    return [
        str(depth.num_layers),
        ", ".join(map(str, depth.removed)) or "–",
        *(_words(estimate) for estimate in lengths),
        *(_percent(estimate) for estimate in shares),
        *(_words(estimate) for estimate in kinds),
        _percent(accuracy),
        f"{depth.pass_ms:.1f}",
    ]


def _words(estimate: Estimate) -> str:
    return "–" if math.isnan(estimate.value) else str(estimate)


def _percent(estimate: Estimate) -> str:
    if math.isnan(estimate.value):
        return "–"
    return f"{100 * estimate.value:.2f} ± {100 * estimate.error:.2f} %"
