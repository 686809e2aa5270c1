"""A drafter's backbone with fewer, larger operations, for passes of a few rows.

Such a pass reads the weights once and is done, so what each operation costs beside that counts:
on one CPU core half of the time, on a GPU the launches.
"""

from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from transformers.cache_utils import Cache


class FusedBackbone(nn.Module):
    """The layers of a model of one of :data:`d3d_ray.models.network.FAMILIES`, for inference.

    ``backbone`` has ``layers``, ``norm``, ``rotary_emb`` and ``config``. Takes over the weights:
    its own layers are emptied.
    """

    def __init__(self, backbone: Any) -> None:
        super().__init__()
        self._last_norm = backbone.norm
        self._rotary = backbone.rotary_emb
        config = backbone.config
        self._num_groups: int = config.num_attention_heads // config.num_key_value_heads
        self.layers = nn.ModuleList()
        while len(backbone.layers):  # One by one, or the weights would lie in memory twice.
            self.layers.append(_FusedLayer(backbone.layers[0], len(self.layers)))
            del backbone.layers[0]

    def forward(
        self,
        hidden: torch.Tensor,  # [1, rows, hidden]
        position_ids: torch.Tensor,  # [1, rows] int64
        visible: torch.Tensor,  # [1, 1, rows, cached + rows] bool
        cache: Cache,
    ) -> torch.Tensor:  # [1, rows, hidden], normed
        cos, sin = rotary_tables(self._rotary, hidden, position_ids)
        bias = hidden.new_zeros(visible.shape).masked_fill_(~visible, -torch.inf)
        bias = bias.repeat(1, 1, self._num_groups, 1)
        rows = hidden[0]
        for layer in self.layers:
            rows = layer(rows, cos, sin, bias, cache)
        normed: torch.Tensor = _norm(rows, self._last_norm)
        return normed[None]


class _FusedLayer(nn.Module):
    def __init__(self, layer: Any, index: int) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        self._head_dim: int = attention.head_dim
        self._scale: float = attention.scaling
        self._num_kv = attention.k_proj.out_features // self._head_dim
        self._num_heads = attention.q_proj.out_features // self._head_dim
        self._norms = nn.ModuleList([layer.input_layernorm, layer.post_attention_layernorm])
        # Qwen3 norms each head of queries and keys.
        self._head_norms = nn.ModuleList(
            getattr(attention, name) for name in ("q_norm", "k_norm") if hasattr(attention, name)
        )
        self._qkv = join_linear(attention.q_proj, attention.k_proj, attention.v_proj)
        self._out = attention.o_proj
        self._gate_up = join_linear(mlp.gate_proj, mlp.up_proj)
        self._activation = mlp.act_fn
        self._down = mlp.down_proj

    def forward(
        self,
        rows: torch.Tensor,  # [rows, hidden]
        cos: torch.Tensor,  # [rows, 1, head_dim]
        sin: torch.Tensor,  # [rows, 1, head_dim], the first half negated
        bias: torch.Tensor,  # [1, 1, groups · rows, columns], 0 or -inf
        cache: Cache,
    ) -> torch.Tensor:  # [rows, hidden]
        rows = rows + self._out(
            self._attend(self._qkv(_norm(rows, self._norms[0])), cos, sin, bias, cache)
        )
        gate, up = self._gate_up(_norm(rows, self._norms[1])).chunk(2, dim=-1)
        down: torch.Tensor = self._down(self._activation(gate) * up)
        return rows + down

    def _attend(
        self,
        qkv: torch.Tensor,  # [rows, (heads + 2 · kv heads) · head_dim]
        cos: torch.Tensor,  # as in forward
        sin: torch.Tensor,
        bias: torch.Tensor,
        cache: Cache,
    ) -> torch.Tensor:  # [rows, heads · head_dim]
        num_rows, dim = len(qkv), self._head_dim
        vectors = qkv.view(num_rows, -1, dim)
        turned, values = vectors.split([self._num_heads + self._num_kv, self._num_kv], dim=1)
        if self._head_norms:
            queries, keys = turned.split([self._num_heads, self._num_kv], dim=1)
            q_norm, k_norm = self._head_norms
            turned = torch.cat([_norm(queries, q_norm), _norm(keys, k_norm)], dim=1)
        turned = rotate(turned, cos, sin).transpose(0, 1)
        all_keys, all_values = cache.update(
            turned[None, self._num_heads :], values.transpose(0, 1)[None], self._index
        )
        # The queries that share a key lie below one another: no key is repeated.
        attended = F.scaled_dot_product_attention(
            turned[: self._num_heads].reshape(1, self._num_kv, -1, dim),
            all_keys,
            all_values,
            attn_mask=bias,
            scale=self._scale,
        )
        by_head = attended.reshape(self._num_heads, num_rows, dim)
        return by_head.transpose(0, 1).reshape(num_rows, -1)


def rotary_tables(
    rotary: Any,
    hidden: torch.Tensor,  # [1, rows, hidden], for its type
    position_ids: torch.Tensor,  # [1, rows] int64
) -> tuple[torch.Tensor, torch.Tensor]:  # each [rows, 1, head_dim]
    """Cosines and sines for :func:`rotate`."""
    cos, sin = (table[0, :, None] for table in rotary(hidden, position_ids))
    # Turning a vector swaps its halves, the first with the other sign.
    low, high = sin.chunk(2, dim=-1)
    return cos, torch.cat([-low, high], dim=-1)


def rotate(
    vectors: torch.Tensor,  # [rows, heads, head_dim]
    cos: torch.Tensor,  # [rows, 1, head_dim]
    sin: torch.Tensor,  # [rows, 1, head_dim], the first half negated
) -> torch.Tensor:  # [rows, heads, head_dim]
    return torch.addcmul(vectors * cos, vectors.roll(vectors.shape[-1] // 2, -1), sin)


def _norm(
    hidden: torch.Tensor,  # [..., size]
    norm: Any,
) -> torch.Tensor:  # [..., size]
    return F.rms_norm(hidden, norm.weight.shape, norm.weight, norm.variance_epsilon)


def join_linear(*layers: nn.Linear) -> nn.Linear:
    """One layer that gives the outputs of several behind one another."""
    with torch.device("meta"):
        joined = nn.Linear(
            layers[0].in_features,
            sum(layer.out_features for layer in layers),
            bias=layers[0].bias is not None,
        )
    with torch.no_grad():
        joined.weight = nn.Parameter(torch.cat([layer.weight for layer in layers]))
        if layers[0].bias is not None:
            joined.bias = nn.Parameter(torch.cat([layer.bias for layer in layers]))
    return joined.requires_grad_(False)
