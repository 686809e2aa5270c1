"""The block-diffusion drafter as a network: a causal LM run with a mask and positions of ours.

Used by inference (``drafter.DrafterModel``) and by training alike.
"""

from collections.abc import Sequence

import torch
from torch import nn
from transformers import PretrainedConfig, PreTrainedModel
from transformers.cache_utils import Cache

from d3d_ray.models.cache import check_can_cut
from d3d_ray.models.fused import FusedBackbone

FAMILIES = ("llama", "qwen2", "qwen3")
"""Model types whose backbone takes our 4D mask, positions and input embeddings as they are."""


class DrafterNetwork(nn.Module):
    """Backbone and head of a causal LM plus the learned embedding of the mask token.

    Rows that hold ``mask_token_id`` are embedded with ``mask_embedding``, all others with the
    model's table, so that the table can stay frozen or be shared with the target.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        mask_token_id: int,
        mask_embedding: torch.Tensor,  # [hidden]
    ) -> None:
        super().__init__()
        check_family(model.config)
        if model.config._attn_implementation not in ("sdpa", "eager"):
            raise ValueError(
                f"attention {model.config._attn_implementation!r} takes no mask of its own; "
                "load the drafter with 'sdpa'"
            )
        self.model = model
        self.mask_token_id = mask_token_id
        self.mask_embedding = nn.Parameter(mask_embedding.detach().clone())
        self.trimmed_head: nn.Linear | None = None
        self.draft_ids: torch.Tensor | None
        self.register_buffer("draft_ids", None, persistent=False)
        """[drafted ids] int64, ascending: what the columns of the logits stand for; None = all."""
        self._fused: FusedBackbone | None = None

    @property
    def config(self) -> PretrainedConfig:
        return self.model.config

    def embed(
        self,
        token_ids: torch.Tensor,  # [batch, rows] int64
    ) -> torch.Tensor:  # [batch, rows, hidden]
        is_mask = (token_ids == self.mask_token_id)[..., None]
        return torch.where(is_mask, self.mask_embedding, self.model.model.embed_tokens(token_ids))

    def forward(
        self,
        token_ids: torch.Tensor,  # [batch, rows] int64
        position_ids: torch.Tensor,  # [batch, rows] int64
        visible: torch.Tensor,  # [batch or 1, 1, rows, cached + rows] bool: row sees column
        cache: Cache | None = None,
    ) -> torch.Tensor:  # [batch, rows, hidden], normed: what the head takes
        embeddings = self.embed(token_ids)
        if self._fused is not None:
            assert cache is not None, "fused layers are for serving"
            fused: torch.Tensor = self._fused(embeddings, position_ids, visible, cache)
            return fused
        mask = visible
        if self.config._attn_implementation == "eager":  # It adds the mask to its scores.
            mask = torch.zeros_like(visible, dtype=embeddings.dtype)
            mask = mask.masked_fill(~visible, torch.finfo(embeddings.dtype).min)
        output = self.model.model(
            inputs_embeds=embeddings,
            position_ids=position_ids,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=cache is not None,
        )
        hidden: torch.Tensor = output.last_hidden_state
        return hidden

    def head(
        self,
        hidden: torch.Tensor,  # [..., hidden]
    ) -> torch.Tensor:  # [..., rows of the head]
        logits: torch.Tensor = (self.trimmed_head or self.model.lm_head)(hidden)
        return logits

    def fuse(self) -> None:
        """Make the layers quick to serve: they can no longer be trained or saved."""
        assert self._fused is None, "the layers are fused already"
        self._fused = FusedBackbone(self.model.model)
        if self.trimmed_head is not None:
            del self.model.lm_head

    def trim_head(
        self,
        draft_ids: torch.Tensor,  # [drafted ids] int64, ascending
    ) -> None:
        """Draft only these tokens. The head's rows are copied, and must stay as they are."""
        head = self.model.lm_head
        assert head.bias is None and int(draft_ids[-1]) < len(head.weight)
        self.draft_ids = draft_ids.to(head.weight.device)
        with torch.device("meta"):
            self.trimmed_head = nn.Linear(head.in_features, len(draft_ids), bias=False)
        rows = head.weight.detach()[self.draft_ids].clone()
        self.trimmed_head.weight = nn.Parameter(rows, requires_grad=False)


def check_family(config: PretrainedConfig) -> None:
    """Raise ``ValueError`` when a model of this config cannot be a drafter."""
    if config.model_type not in FAMILIES:
        raise ValueError(
            f"a drafter of type {config.model_type!r} is not supported; "
            f"use one of the families {', '.join(FAMILIES)}"
        )
    check_can_cut(config)


def evenly_spaced(num_layers: int, num_kept: int) -> list[int]:
    """Indices of ``num_kept`` of ``num_layers`` layers, the first and the last included."""
    if not 1 <= num_kept <= num_layers:
        raise ValueError(
            f"drafter.num_layers is {num_kept}; the checkpoint has 1 to {num_layers} layers to keep"
        )
    if num_kept == 1:
        return [0]
    return [round(index * (num_layers - 1) / (num_kept - 1)) for index in range(num_kept)]


def select_layers(model: PreTrainedModel, kept: Sequence[int]) -> None:
    """Keep only these layers of a model of one of the families, in order, in place.

    Everything that counts layers is renumbered, or a cache would be indexed by the old numbers.
    """
    assert list(kept) == sorted(set(kept)) and kept
    backbone, config = model.model, model.config
    backbone.layers = nn.ModuleList(backbone.layers[index] for index in kept)
    for new_index, layer in enumerate(backbone.layers):
        for module in layer.modules():
            if hasattr(module, "layer_idx"):
                module.layer_idx = new_index
    if getattr(config, "layer_types", None) is not None:
        config.layer_types = [config.layer_types[index] for index in kept]
    config.num_hidden_layers = len(kept)
