"""A picture of a few rounds: what the drafter does while the target verifies."""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from d3d_ray.records import Round

_NS_PER_MS = 1e6
_DPI = 100
_VERIFIER_Y, _DRAFTER_Y, _HEIGHT = 1.0, 0.0, 0.56

# From the palette of Okabe and Ito, which colour-blind people can tell apart.
_COLOURS = {"hit": "#009E73", "soft": "#E69F00", "jit": "#CC79A7", "none": "#BBBBBB"}
_DRAFT_COLOUR = "#56B4E9"
_MEANINGS = {
    "hit": "hit: drafted for this very outcome",
    "soft": "soft: another branch for the same k",
    "jit": "jit: drafted when the outcome was known",
    "none": "none: no drafts",
}


def choose_window(rounds: Sequence[Round], size: int = 10) -> list[Round]:
    """Up to ``size`` consecutive decode rounds from the middle of the longest answer."""
    counts = Counter(r.request for r in rounds if not r.is_prefill)
    if not counts:
        return []
    request, num_rounds = counts.most_common(1)[0]
    decode = [r for r in rounds if r.request == request and not r.is_prefill]
    start = max(0, (num_rounds - size) // 2)
    return decode[start : start + size]


def draw_timeline(file: Path, rounds: Sequence[Round], *, title: str, size: int = 10) -> None:
    """Draw ``size`` rounds from the middle of the longest answer as a PNG of 1200 × 400 pixels.

    Raises ``ValueError`` when there are no decode rounds.
    """
    window = choose_window(rounds, size + 1)
    if not window:
        raise ValueError("there are no rounds for a timeline: ask for more than one token")
    # The drafts of a round are made before it, so the last round only lends its drafts.
    shown = window[:size] if len(window) > 1 else window
    origin_ns = shown[0].verify_start_ns
    figure = Figure(figsize=(12, 4), dpi=_DPI, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for r in shown:
        _draw_verification(axes, r, origin_ns)
    for r in window[1:]:
        _draw_drafting(axes, r, origin_ns, is_target_shown=r in shown)
    end_ns = max(shown[-1].verify_end_ns, *(r.draft_end_ns for r in window))
    axes.set_xlim(0.0, (end_ns - origin_ns) / _NS_PER_MS)
    _dress(axes, title)
    figure.savefig(file, format="png")


def _draw_verification(axes: Axes, r: Round, origin_ns: int) -> None:
    tokens = "1 token" if r.num_emitted == 1 else f"{r.num_emitted} tokens"
    label = f"verify {r.epoch}\n{tokens}"
    _draw_bar(axes, r.verify_start_ns, r.verify_end_ns, origin_ns, _VERIFIER_Y, r.kind, label)


def _draw_drafting(axes: Axes, r: Round, origin_ns: int, *, is_target_shown: bool) -> None:
    if not r.draft_end_ns:
        return
    label = f"draft\nfor {r.epoch}"
    _draw_bar(axes, r.draft_start_ns, r.draft_end_ns, origin_ns, _DRAFTER_Y, "draft", label)
    if is_target_shown:
        edges = (_DRAFTER_Y + _HEIGHT / 2, _VERIFIER_Y - _HEIGHT / 2)
        ends = [
            ((time_ns - origin_ns) / _NS_PER_MS, y)
            for time_ns, y in zip((r.draft_end_ns, r.verify_start_ns), edges, strict=True)
        ]
        arrow = {"arrowstyle": "-|>", "color": "#444444", "linewidth": 1.0}
        axes.annotate("", xy=ends[1], xytext=ends[0], arrowprops=arrow)


def _draw_bar(
    axes: Axes, start_ns: int, end_ns: int, origin_ns: int, y: float, kind: str, label: str
) -> None:
    start, width = (start_ns - origin_ns) / _NS_PER_MS, (end_ns - start_ns) / _NS_PER_MS
    colour = _COLOURS.get(kind, _DRAFT_COLOUR)
    axes.barh(y, width, _HEIGHT, left=start, color=colour, edgecolor="black", linewidth=0.8)
    axes.text(start + width / 2, y, label, ha="center", va="center", fontsize=8.5, clip_on=True)


def _dress(axes: Axes, title: str) -> None:
    axes.set_yticks([_VERIFIER_Y, _DRAFTER_Y], ["verifier", "drafter"])
    axes.set_ylim(_DRAFTER_Y - 0.45, _VERIFIER_Y + 0.45)
    axes.set_xlabel("time in ms")
    axes.set_title(title, loc="left", fontsize=11)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)
    colours = {_MEANINGS[kind]: colour for kind, colour in _COLOURS.items()}
    colours["packed draft for every outcome"] = _DRAFT_COLOUR
    handles = [
        Patch(facecolor=colour, edgecolor="black", label=meaning)
        for meaning, colour in colours.items()
    ]
    axes.figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
