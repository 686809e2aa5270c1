"""Attention for training rows: FlexAttention on a GPU, plain matrix products in bf16 on a CPU.

FlexAttention follows the rule of the mask without its memory. On CPUs with bf16 units the plain
products take a third of the time of torch's SDPA, forward and backward together.
"""

from functools import cache
from typing import Any, Literal

import torch
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention
from transformers import AttentionInterface, PretrainedConfig

from d3d_ray.training.layout import TrainingRow, see

Attention = Literal["sdpa", "dense", "flex"]

_FLEX, _DENSE = "d3d_flex", "d3d_dense"


def use_attention(config: PretrainedConfig, attention: Attention) -> None:
    """From now on a model of this config attends so.

    ``flex`` takes a :func:`block_mask` in place of a dense mask, ``dense`` a dense one as before.
    """
    if attention == "flex":
        AttentionInterface.register(_FLEX, _attend_flex)
        config._attn_implementation = _FLEX
    elif attention == "dense":
        AttentionInterface.register(_DENSE, _attend_dense)
        config._attn_implementation = _DENSE


def block_mask(
    row: TrainingRow,
    queries: torch.Tensor,  # [queries] int64, rows of the row
    keys: torch.Tensor,  # [keys] int64, rows of the row
) -> BlockMask:
    def is_seen(
        batch: torch.Tensor, head: torch.Tensor, query: torch.Tensor, key: torch.Tensor
    ) -> torch.Tensor:
        return see(row, queries[query], keys[key])

    return create_block_mask(
        is_seen,
        B=None,
        H=None,
        Q_LEN=len(queries),
        KV_LEN=len(keys),
        device=row.token_ids.device,
    )


def _attend_flex(
    module: torch.nn.Module,
    query: torch.Tensor,  # [batch, heads, rows, head_dim]
    key: torch.Tensor,  # [batch, key_heads, rows, head_dim]
    value: torch.Tensor,  # [batch, key_heads, rows, head_dim]
    attention_mask: BlockMask,
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:  # [batch, rows, heads, head_dim]
    output = _kernel(query.is_cuda)(
        query,
        key,
        value,
        block_mask=attention_mask,
        scale=scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return output.transpose(1, 2).contiguous(), None


def _attend_dense(
    module: torch.nn.Module,
    query: torch.Tensor,  # [1, heads, rows, head_dim]
    key: torch.Tensor,  # [1, key_heads, columns, head_dim]
    value: torch.Tensor,  # [1, key_heads, columns, head_dim]
    attention_mask: torch.Tensor,  # [1, 1, rows, columns] bool
    scaling: float | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:  # [1, rows, heads, head_dim]
    assert query.shape[0] == 1 and scaling is not None
    num_heads, num_rows, head_dim = query.shape[1:]
    num_keys = key.shape[1]
    grouped = (query * scaling).reshape(num_keys, -1, head_dim)  # Heads that share a key.
    scores = torch.bmm(grouped, key[0].transpose(1, 2)).view(num_heads, num_rows, -1)
    hidden = torch.zeros_like(attention_mask[0], dtype=query.dtype)
    scores += hidden.masked_fill_(~attention_mask[0], torch.finfo(query.dtype).min)
    weights = scores.softmax(dim=-1).view(num_keys, -1, key.shape[2])
    output = torch.bmm(weights, value[0]).view(num_heads, num_rows, head_dim)
    return output.transpose(0, 1)[None].contiguous(), None


@cache
def _kernel(is_compiled: bool) -> Any:
    # Uncompiled it makes the dense mask after all, which is right for small checks on a CPU.
    return torch.compile(flex_attention) if is_compiled else flex_attention
