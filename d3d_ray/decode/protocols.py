"""The two seams of the decode loops. A verifier takes a batch, but may loop inside."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from d3d_ray.records import FromDrafter, ToDrafter


@dataclass(frozen=True, slots=True)
class Block:
    """Tokens to run through the target behind ``start`` cached ones."""

    request: str
    start: int
    tokens: tuple[int, ...]
    num_logits: int
    """How many of the last rows need logits; 0 for an inner chunk of a prompt."""
    is_read: bool = False
    """The drafter beside the verifier, if there is one, reads the block's hidden states."""


class Verifier(Protocol):
    """The target and its KV caches, one a request, made at the first block that starts at 0."""

    def forward(self, blocks: Sequence[Block]) -> list[torch.Tensor]:
        """Run the blocks and extend their caches.

        Returns for each block logits ``[num_logits, vocab]``, without padding ids. Raises
        ``ValueError`` when a cache does not hold exactly ``block.start`` tokens.
        """
        ...

    def cut(self, request: str, length: int) -> None:
        """Keep the first ``length`` entries of the request's cache."""
        ...

    def free(self, request: str) -> None:
        """Forget the request; unknown ones are ignored."""
        ...


class Drafter(Protocol):
    """The far end of a link to a drafter, which may be slow, silent, restarted or dead."""

    def send(self, message: ToDrafter) -> bool:
        """Hand over a message without ever blocking; False when it could not be delivered."""
        ...

    def poll(self, timeout: float) -> list[FromDrafter]:
        """What has arrived; waits up to ``timeout`` seconds for the first message."""
        ...
