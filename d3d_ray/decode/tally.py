"""What all rounds of a verifier's life add up to, for monitoring. Only ever grows."""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any

from d3d_ray.records import Round


@dataclass(slots=True)
class Tally:
    """Written by the loop's thread; other threads may read it, and get sums of the moment."""

    num_drafts: int
    """Of a full block."""
    num_blocks: int = 0
    """That the verifier has run: rounds and chunks of prompts."""
    num_prefilled_tokens: int = 0
    num_rounds: int = 0
    """Without prefills."""
    num_emitted_tokens: int = 0
    """The prefills' included."""
    num_drafts_proposed: int = 0
    num_drafts_accepted: int = 0
    bubble_ns: int = 0
    """How long the verifier stood idle before rounds."""
    hop_ns: int = 0
    num_hops: int = 0
    """Rounds whose hop was measured."""
    kinds: Counter[str] = field(default_factory=Counter)
    accepted_at: list[int] = field(init=False)
    """Rounds in which the draft at this position of the block was accepted."""

    def __post_init__(self) -> None:
        self.accepted_at = [0] * self.num_drafts

    def observe_chunk(self, num_tokens: int) -> None:
        """Of a prompt."""
        self.num_blocks += 1
        self.num_prefilled_tokens += num_tokens

    def observe(self, measured: Round) -> None:
        self.num_emitted_tokens += measured.num_emitted
        if measured.is_prefill:
            return
        self.num_rounds += 1
        self.num_blocks += 1
        self.num_drafts_proposed += measured.num_drafts
        self.num_drafts_accepted += measured.num_accepted
        self.bubble_ns += measured.wait_ns
        self.hop_ns += measured.hop_ns
        self.num_hops += bool(measured.hop_ns)
        self.kinds[measured.kind] += 1
        for position in range(measured.num_accepted):
            self.accepted_at[position] += 1

    def counters(self) -> dict[str, Any]:
        """Plain values; times are sums in ns."""
        return {
            "prefilled_tokens": self.num_prefilled_tokens,
            "rounds": self.num_rounds,
            "emitted_tokens": self.num_emitted_tokens,
            "drafts_proposed": self.num_drafts_proposed,
            "drafts_accepted": self.num_drafts_accepted,
            "accepted_per_position": list(self.accepted_at),
            "outcomes": {kind: self.kinds[kind] for kind in ("hit", "soft", "jit", "none")},
            "bubble_ns": self.bubble_ns,
            "hop_ns": self.hop_ns,
            "hops": self.num_hops,
        }
