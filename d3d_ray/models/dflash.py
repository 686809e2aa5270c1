"""The DFlash drafter (arXiv 2602.06036): layers that read the target's hidden states.

::

    target's layers i, j, …  of the committed tokens ── fc ── hidden_norm ── H
    each layer's keys and values:   [W_k H ; W_k block]   [W_v H ; W_v block]
    its queries:                    the block  [anchor, MASK, MASK, …]; it sees H and itself
    a mask at position p predicts the token at p: the target's embeddings below, its head on top

Keys and values of H are those of a cache: it is extended by what was committed, and cut back
behind each block. Names of the weights are those of the public checkpoints.
"""

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from transformers import AutoModel, PretrainedConfig
from transformers.cache_utils import Cache

from d3d_ray.models.fused import FusedBackbone, join_linear, rotary_tables, rotate
from d3d_ray.models.network import check_family


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashSection:
    """What a checkpoint says of itself. Raises ``ValueError`` on a value out of range."""

    block_size: int
    """Anchor and drafts together."""
    mask_token_id: int
    target_layer_ids: tuple[int, ...]
    """From 0; in the order in which ``fc`` reads them."""
    num_target_layers: int
    """Of which these are."""
    fingerprint: str = ""
    """Of the target's embeddings and head; empty = not known."""

    def __post_init__(self) -> None:
        if self.block_size < 2:
            raise ValueError(f"block_size is {self.block_size}; with the anchor it is 2 or more")
        if self.mask_token_id < 0 or not self.target_layer_ids:
            raise ValueError(f"a mask token and target layers are needed, not {self}")


def spaced_layers(num_target_layers: int, num_layers: int) -> tuple[int, ...]:
    """The layers that DFlash reads: evenly spaced from the second to the third but last.

    Raises ``ValueError`` for a target that is too shallow.
    """
    first, last = 1, num_target_layers - 3
    if last < first:
        raise ValueError(
            f"a target of {num_target_layers} layers is too shallow for DFlash: it needs 4"
        )
    if num_layers == 1:
        return (num_target_layers // 2,)
    step = (last - first) / (num_layers - 1)
    return tuple(round(first + index * step) for index in range(num_layers))


class DFlashNetwork(nn.Module):
    """The drafter's own weights; embeddings and head are the target's.

    ``config`` is that of a model of one of the families, whose decoder layers these are.
    """

    def __init__(self, config: PretrainedConfig, num_features: int, dtype: torch.dtype) -> None:
        super().__init__()
        check_family(config)
        self.public_config = config
        """For the folder: with the target's vocabulary."""
        config = copy.deepcopy(config)
        # The backbone's own table is thrown away: it need not be large.
        config.vocab_size, config.pad_token_id = 1, None
        backbone = AutoModel.from_config(config, dtype=dtype, attn_implementation="sdpa")
        self.config: PretrainedConfig = backbone.config
        size = config.hidden_size
        self.fc = nn.Linear(num_features * size, size, bias=False, dtype=dtype)
        self.hidden_norm = type(backbone.norm)(size, eps=config.rms_norm_eps).to(dtype)
        self.layers: Any = backbone.layers
        self.norm = backbone.norm
        self.rotary_emb = backbone.rotary_emb
        self._fused: FusedBackbone | None = None
        self._projection: nn.Linear | None = None
        self._key_norms = [getattr(layer.self_attn, "k_norm", None) for layer in self.layers]
        self.head_dim: int = self.layers[0].self_attn.head_dim

    @property
    def num_layers(self) -> int:
        return len(self._key_norms)

    @property
    def dtype(self) -> torch.dtype:
        return self.norm.weight.dtype

    @property
    def device(self) -> torch.device:
        return self.norm.weight.device

    def inject(
        self,
        features: torch.Tensor,  # [rows, features · hidden], of committed tokens
        position_ids: torch.Tensor,  # [rows] int64
        cache: Cache,
    ) -> None:
        """Extend the cache by keys and values of the committed tokens."""
        context = self.hidden_norm(self.fc(features))
        num_rows, dim = len(context), self.head_dim
        cos, sin = rotary_tables(self.rotary_emb, context[None], position_ids[None])
        if self._projection is not None:
            by_layer = self._projection(context).view(num_rows, self.num_layers, 2, -1, dim)
            pairs = [(part[:, 0], part[:, 1]) for part in by_layer.unbind(dim=1)]
        else:
            parts = [(layer.self_attn.k_proj, layer.self_attn.v_proj) for layer in self.layers]
            pairs = [
                (k(context).view(num_rows, -1, dim), v(context).view(num_rows, -1, dim))
                for k, v in parts
            ]
        for index, (keys, values) in enumerate(pairs):
            norm = self._key_norms[index]
            turned = rotate(keys if norm is None else norm(keys), cos, sin)
            cache.update(turned.transpose(0, 1)[None], values.transpose(0, 1)[None], index)

    def forward(
        self,
        embeddings: torch.Tensor,  # [1, rows, hidden] of anchors and masks
        position_ids: torch.Tensor,  # [1, rows] int64
        visible: torch.Tensor,  # [1, 1, rows, cached + rows] bool: row sees column
        cache: Cache,
    ) -> torch.Tensor:  # [1, rows, hidden], normed: what the head takes
        if self._fused is not None:
            fused: torch.Tensor = self._fused(embeddings, position_ids, visible, cache)
            return fused
        tables = self.rotary_emb(embeddings, position_ids)
        hidden = embeddings
        for layer in self.layers:
            hidden = layer(
                hidden,
                attention_mask=visible,
                position_ids=position_ids,
                past_key_values=cache,
                use_cache=True,
                position_embeddings=tables,
            )
        normed: torch.Tensor = self.norm(hidden)
        return normed

    def fuse(self) -> None:
        """Make passes quick: the network can no longer be trained or saved."""
        assert self._fused is None, "the layers are fused already"
        attentions = [layer.self_attn for layer in self.layers]
        self._projection = join_linear(*(p for a in attentions for p in (a.k_proj, a.v_proj)))
        self._fused = FusedBackbone(self)
