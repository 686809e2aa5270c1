"""The mode ``dflash``: a drafter beside the target reads its hidden states, so both take turns.

::

    verify |       | verify |       | verify | …     on one device, in one thread
           | draft |        | draft |
"""

import logging
import time
from collections.abc import Sequence
from typing import Protocol

import torch

from d3d_ray.decode.modes import ModePolicy
from d3d_ray.decode.passes import shared_scores
from d3d_ray.decode.plans import Work
from d3d_ray.decode.session import Session
from d3d_ray.records import Branch, Table

logger = logging.getLogger(__name__)


class FeatureDrafter(Protocol):
    """What the mode asks of the drafter; the verifier shows it what it needs of each block."""

    max_positions: int

    @property
    def block_size(self) -> int: ...

    def draft(
        self, request: str, tokens: Sequence[int]
    ) -> torch.Tensor:  # [block_size - 1, vocab] fp32
        """Logits for the tokens behind the committed ones."""
        ...


class FeatureDrafting(ModePolicy):
    """The policy of the mode. Drafts are drawn as the target draws, if noise is shared."""

    def __init__(self, drafter: FeatureDrafter, *, is_noise_shared: bool) -> None:
        self._drafter = drafter
        self._is_noise_shared = is_noise_shared

    @property
    def num_drafts(self) -> int:
        """Of a full block."""
        return self._drafter.block_size - 1

    def before_round(self, session: Session) -> None:
        """Draft behind the last token, unless the request measures faster without."""
        fits = len(session.tokens) + self.num_drafts <= self._drafter.max_positions
        if not session.wants_drafts or not fits:
            return
        start_ns = time.monotonic_ns()
        try:
            drafts = self._draw(session)
        except torch.OutOfMemoryError as error:
            logger.warning("request %s: no memory to draft in: %s", session.id, error)
            return
        end_ns = time.monotonic_ns()
        session.table = Table(
            request=session.id,
            epoch=session.epoch,
            branches=(Branch(None, session.tokens[-1], drafts),),
            received_ns=start_ns,
            started_ns=start_ns,
            finished_ns=end_ns,
            arrived_ns=end_ns,
            num_rows=self._drafter.block_size,
        )

    def _draw(self, session: Session) -> tuple[int, ...]:
        logits = self._drafter.draft(session.id, session.tokens)
        if self._is_noise_shared:
            request = session.request
            work = Work(
                request=session.id,
                epoch=session.epoch,
                tokens=tuple(session.tokens),
                drafts=None,
                prompt_length=len(request.prompt),
                sampling=request.sampling,
                stop_ids=request.stop_ids,
            )
            logits = shared_scores(logits, work, work.tokens, None)
        return tuple(logits.argmax(dim=-1).tolist())
