"""A DFlash drafter at work: drafts behind the hidden states that its target leaves."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import nn
from transformers import PreTrainedModel

from d3d_ray.models.cache import SlotCache
from d3d_ray.models.cpu import pack_weights
from d3d_ray.models.dflash import DFlashNetwork, DFlashSection

MAX_PENDING = 512
"""Committed tokens whose hidden states wait for the next drafts at most."""


@dataclass(slots=True)
class _State:
    cache: SlotCache
    pending: list[torch.Tensor] = field(default_factory=list)
    """[rows, features · hidden] each: committed tokens that are not in the cache yet."""

    @property
    def num_seen(self) -> int:
        return self.cache.length + sum(map(len, self.pending))

    def cut(self, length: int) -> None:
        kept: list[torch.Tensor] = []
        num_left = length - self.cache.length
        for features in self.pending:
            if num_left > 0:
                kept.append(features[:num_left])
                num_left -= len(features)
        self.pending = kept
        self.cache.cut(min(length, self.cache.length))


class DFlashDrafter:
    """A DFlash drafter on a target's model, and its KV caches, one a request.

    It is a reader for :meth:`d3d_ray.models.target.Target.read_with`.
    """

    def __init__(
        self,
        network: DFlashNetwork,
        section: DFlashSection,
        target: PreTrainedModel,
        *,
        vocab_size: int,
    ) -> None:
        self.network = network.eval()
        self.section = section
        self.target = target
        self.vocab_size = vocab_size
        self.max_positions: int = network.config.max_position_embeddings
        self._states: dict[str, _State] = {}

    @property
    def block_size(self) -> int:
        return self.section.block_size

    @property
    def mask_token_id(self) -> int:
        return self.section.mask_token_id

    @property
    def layer_ids(self) -> tuple[int, ...]:
        """Of the target: those whose outputs :meth:`read` takes."""
        return self.section.target_layer_ids

    @property
    def kv_bytes_per_token(self) -> int:
        heads = self.network.config.num_key_value_heads
        size = 2 * heads * self.network.head_dim * self.network.dtype.itemsize
        return self.network.num_layers * size

    @property
    def device(self) -> torch.device:
        return self.network.device

    def read(
        self,
        request: str,
        start: int,
        features: torch.Tensor,  # [rows, layers · hidden]
    ) -> None:
        """Hidden states of the tokens from ``start`` on; what was read from there on is dropped."""
        if request not in self._states:
            self._states[request] = _State(SlotCache(self.network.num_layers))
        state = self._states[request]
        state.cut(start)
        assert state.num_seen == start, "tokens were left out"
        state.pending.append(features)
        if sum(map(len, state.pending)) > MAX_PENDING:
            self._absorb(state)

    def draft(
        self, request: str, tokens: Sequence[int]
    ) -> torch.Tensor:  # [block_size - 1, vocab] fp32; -inf for the mask token
        """Logits for the tokens behind the committed ones, all of which but the last were read."""
        state, start, size = self._states[request], len(tokens) - 1, self.block_size
        state.cut(start)
        assert state.num_seen == start, "tokens were left out"
        block = [tokens[-1]] + [self.mask_token_id] * (size - 1)
        with torch.inference_mode():
            self._absorb(state)
            visible = torch.ones(1, 1, size, start + size, dtype=torch.bool, device=self.device)
            hidden = self.network(
                embed(self.target, torch.tensor([block], device=self.device)),
                torch.arange(start, start + size, device=self.device)[None],
                visible,
                state.cache,
            )
            state.cache.cut(start)
            logits = head(self.target, hidden[0, 1:])[:, : self.vocab_size]
        # Copied outside, or a caller could not write to it.
        logits = logits.to(torch.float32, copy=True)
        logits[:, self.mask_token_id : self.mask_token_id + 1] = -torch.inf
        return logits

    def free(self, request: str) -> None:
        """Forget the request; unknown ones are ignored."""
        self._states.pop(request, None)

    def fuse(self) -> None:
        """Make passes quick. The drafter can then no longer be trained or saved."""
        self.network.fuse()
        pack_weights(self.network)

    def _absorb(self, state: _State) -> None:
        if not state.pending:
            return
        features = torch.cat(state.pending)
        state.pending.clear()
        start = state.cache.length
        positions = torch.arange(start, start + len(features), device=self.device)
        with torch.inference_mode():
            self.network.inject(features.to(self.network.dtype), positions, state.cache)


def embed(
    target: PreTrainedModel,
    token_ids: torch.Tensor,  # [...] int64
) -> torch.Tensor:  # [..., hidden]
    table: nn.Module = target.get_input_embeddings()
    embedded: torch.Tensor = table(token_ids)
    return embedded


def head(
    target: PreTrainedModel,
    hidden: torch.Tensor,  # [rows, hidden]
) -> torch.Tensor:  # [rows, rows of the head]
    logits: torch.Tensor = target.get_output_embeddings()(hidden)
    return logits
