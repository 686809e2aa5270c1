"""The drafter: packed passes behind a KV cache that holds clean, token-causal rows only."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from d3d_ray.models.cache import SlotCache
from d3d_ray.models.cpu import pack_weights
from d3d_ray.models.network import DrafterNetwork
from d3d_ray.models.section import DrafterSection
from d3d_ray.models.target import check_token_ids
from d3d_ray.packing import PackedPass

MAX_GLUE = 256
"""More missing tokens than this are run ahead of the packed pass, whose mask is quadratic."""

_CHUNK = 512


@dataclass(slots=True)
class _State:
    cache: SlotCache
    token_ids: list[int] = field(default_factory=list)
    """The tokens in the cache: what may stay is decided by these and by nothing else."""


class DrafterModel:
    """A drafter and its KV caches, one a request.

    ``vocab_size`` counts the tokenizer's ids; it leaves out padding rows of the head.
    ``draft_ids`` are those that can be drafted, where the head is trimmed.
    """

    def __init__(
        self, network: DrafterNetwork, section: DrafterSection, *, vocab_size: int
    ) -> None:
        assert network.mask_token_id == section.mask_token_id
        self.network = network.eval()
        self.section = section
        self.vocab_size = min(vocab_size, network.config.vocab_size)
        self.max_positions: int = network.config.max_position_embeddings
        self._states: dict[str, _State] = {}

    @property
    def block_size(self) -> int:
        return self.section.block_size

    @property
    def label_shift(self) -> bool:
        return self.section.label_shift

    @property
    def mask_token_id(self) -> int:
        return self.section.mask_token_id

    @property
    def draft_ids(self) -> torch.Tensor | None:
        return self.network.draft_ids

    @property
    def is_trained(self) -> bool:
        return self.section.is_trained

    @property
    def num_layers(self) -> int:
        return int(self.network.config.num_hidden_layers)

    @property
    def device(self) -> torch.device:
        return self.network.mask_embedding.device

    def match_cache(self, request: str, tokens: Sequence[int], anchor: int) -> int:
        """Cut the request's cache to what agrees with ``tokens``; returns how many are cached then.

        ``tokens`` are the committed tokens and the drafts under verification, ``anchor`` is the
        index of the anchor among them. At most ``anchor`` entries stay, since the anchor's row is
        always run again. When more than ``MAX_GLUE`` tokens before the anchor are missing, they
        are run here. Raises ``ValueError`` for a token id without an embedding.
        """
        assert 0 <= anchor < len(tokens)
        state = self._states.get(request)
        if state is None:
            state = self._states[request] = _State(SlotCache(self.num_layers))
        _cut(state, min(_common_length(state.token_ids, tokens), anchor))
        num_kept = len(state.token_ids)
        check_token_ids(tokens[num_kept:], self.network.config.vocab_size)
        if anchor - num_kept > MAX_GLUE:
            for first in range(num_kept, anchor, _CHUNK):
                self._run_clean(state, tokens[first : min(first + _CHUNK, anchor)])
        return len(state.token_ids)

    def forward(
        self,
        request: str,
        packed: PackedPass,
        num_glue: int,
        rows: Sequence[int],
    ) -> torch.Tensor:  # [len(rows), vocab_size or drafted ids] fp32; -inf for the mask token
        """Run one packed pass behind the cache; afterwards its glue is cached and nothing else.

        The first ``num_glue`` rows are the glue, which starts where the cache ends. Only ``rows``
        go through the head.
        """
        state = self._states[request]
        start = len(state.token_ids)
        assert int(packed.position_ids[0]) == start, "the glue starts where the cache ends"
        assert int(packed.position_ids.max()) < self.max_positions
        hidden = self._run(state, packed.token_ids, packed.position_ids, packed.visible)
        state.cache.cut(start + num_glue)
        state.token_ids.extend(packed.token_ids[:num_glue].tolist())
        with torch.inference_mode():
            logits = self.network.head(hidden[list(rows)])[:, : self.vocab_size]
        # Copied outside, or a caller could not write to it.
        logits = logits.to(torch.float32, copy=True)
        if self.draft_ids is None and self.mask_token_id < self.vocab_size:
            logits[:, self.mask_token_id] = -torch.inf
        return logits

    def fuse(self) -> None:
        """Make passes quick. The drafter can then no longer be trained or saved."""
        self.network.fuse()
        pack_weights(self.network)

    def free(self, request: str) -> None:
        """Forget the request; unknown ones are ignored."""
        self._states.pop(request, None)

    def _run_clean(self, state: _State, tokens: Sequence[int]) -> None:
        start, num_rows = len(state.token_ids), len(tokens)
        visible = torch.ones(num_rows, num_rows, dtype=torch.bool).tril()
        self._run(state, torch.tensor(tokens), torch.arange(start, start + num_rows), visible)
        state.token_ids.extend(tokens)

    def _run(
        self,
        state: _State,
        token_ids: torch.Tensor,  # [rows] int64
        position_ids: torch.Tensor,  # [rows] int64
        visible: torch.Tensor,  # [rows, rows] bool
    ) -> torch.Tensor:  # [rows, hidden]
        prefix = torch.ones(len(token_ids), len(state.token_ids), dtype=torch.bool)
        mask = torch.cat([prefix, visible], dim=1)
        with torch.inference_mode():
            hidden: torch.Tensor = self.network(
                token_ids[None].to(self.device),
                position_ids[None].to(self.device),
                mask[None, None].to(self.device),
                state.cache,
            )
            return hidden[0]


def _common_length(cached: list[int], tokens: Sequence[int]) -> int:
    limit = min(len(cached), len(tokens))
    if cached[:limit] == list(tokens[:limit]):  # The common case, at the speed of C.
        return limit
    return next(index for index in range(limit) if cached[index] != tokens[index])


def _cut(state: _State, length: int) -> None:
    state.cache.cut(length)
    del state.token_ids[length:]
