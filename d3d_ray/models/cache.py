"""KV caches that are written in place and cut back in O(1)."""

import torch
from transformers import DynamicCache, PretrainedConfig
from transformers.cache_utils import Cache, CacheLayerMixin, DynamicLayer

_STEP = 256
_MAX_GROWTH = 2048


class _SlotLayer(CacheLayerMixin):
    """Keys and values of one layer in buffers ``[1, heads, capacity, head_dim]``.

    The buffers double until they hold ``_MAX_GROWTH`` tokens and then grow by that many, so that
    what is allocated stays close to what the memory budget counts. They start as zeros: what
    attention reads beyond ``length`` is masked, but must be finite.
    """

    is_croppable = True
    is_sliding = False

    def __init__(self, align: int) -> None:
        super().__init__()
        self.length = 0
        self._align = align

    def lazy_initialization(
        self,
        key_states: torch.Tensor,  # [1, heads, rows, head_dim]
        value_states: torch.Tensor,  # [1, heads, rows, head_dim]
    ) -> None:
        self.keys = key_states.new_empty((*key_states.shape[:2], 0, key_states.shape[3]))
        self.values = value_states.new_empty((*value_states.shape[:2], 0, value_states.shape[3]))
        self.is_initialized = True

    def update(
        self,
        key_states: torch.Tensor,  # [1, heads, rows, head_dim]
        value_states: torch.Tensor,  # [1, heads, rows, head_dim]
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:  # each [1, heads, aligned length, head_dim]
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        assert self.keys is not None and self.values is not None
        start, self.length = self.length, self.length + key_states.shape[2]
        if self.length > self.keys.shape[2]:
            self.keys = _grown(self.keys, start, self.length)
            self.values = _grown(self.values, start, self.length)
        self.keys[:, :, start : self.length] = key_states
        self.values[:, :, start : self.length] = value_states
        num_read = align_up(self.length, self._align)
        return self.keys[:, :, :num_read], self.values[:, :, :num_read]

    def cut(self, length: int) -> None:
        assert 0 <= length <= self.length, f"cannot cut {self.length} entries to {length}"
        self.length = length

    def get_seq_length(self) -> int:
        return self.length

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.length + query_length, 0

    def get_max_length(self) -> int:
        return -1  # transformers' word for "no limit"

    @property
    def bytes_per_token(self) -> int:
        if self.keys is None or self.values is None:
            return 0
        return (self.keys.nbytes + self.values.nbytes) // self.keys.shape[2]


def align_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _grown(
    buffer: torch.Tensor,  # [1, heads, capacity, head_dim]
    num_used: int,
    num_needed: int,
) -> torch.Tensor:  # [1, heads, larger capacity, head_dim]
    capacity = buffer.shape[2]
    wanted = max(num_needed, capacity + min(capacity, _MAX_GROWTH))
    larger = buffer.new_zeros((*buffer.shape[:2], align_up(wanted, _STEP), buffer.shape[3]))
    larger[:, :, :num_used] = buffer[:, :, :num_used]
    return larger


class SlotCache(Cache):
    """The KV cache of one request. Its tensors live under ``torch.inference_mode``.

    ``align`` rounds up how many entries attention reads; those beyond ``length`` must be masked.
    It divides 256.
    """

    def __init__(self, num_layers: int, *, align: int = 1) -> None:
        assert _STEP % align == 0
        self._slots = [_SlotLayer(align) for _ in range(num_layers)]
        super().__init__(layers=[*self._slots])

    @property
    def length(self) -> int:
        """Number of tokens held."""
        return self._slots[0].length

    def cut(self, length: int) -> None:
        """Keep the first ``length`` entries. Costs nothing; the buffers stay."""
        for layer in self._slots:
            layer.cut(length)

    @property
    def is_filled(self) -> bool:
        """Whether every layer holds the same, positive number of tokens."""
        return self.length > 0 and all(layer.length == self.length for layer in self._slots)

    @property
    def bytes_per_token(self) -> int:
        return sum(layer.bytes_per_token for layer in self._slots)


def check_can_cut(config: PretrainedConfig) -> None:
    """Refuse a model whose KV cache cannot be cut back to any earlier length.

    Raises ``ValueError`` that names the layer type.
    """
    name = config.model_type
    if config.is_encoder_decoder:
        raise ValueError(
            f"{name!r} is an encoder-decoder model; only decoder-only models can be decoded in "
            "blocks"
        )
    text_config = config.get_text_config(decoder=True)
    try:
        layers = DynamicCache(config=text_config).layers
    except KeyError as error:
        raise _cannot_cut(name, str(error.args[0])) from error
    layer_types = getattr(text_config, "layer_types", None) or [None] * len(layers)
    for layer, layer_type in zip(layers, layer_types, strict=True):
        # Exactly this class: its subclasses keep a window, a state or an index besides.
        if type(layer) is not DynamicLayer:
            raise _cannot_cut(name, layer_type or _layer_type_of(text_config, layer))


def _layer_type_of(config: PretrainedConfig, layer: object) -> str:
    if getattr(config, "sliding_window", None) is not None:
        return f"sliding_attention (window {config.sliding_window})"
    if getattr(config, "attention_chunk_size", None) is not None:
        return f"chunked_attention (chunk {config.attention_chunk_size})"
    return type(layer).__name__


def _cannot_cut(name: str, layer_type: str) -> ValueError:
    return ValueError(
        f"{name!r} has layers of type {layer_type!r}, whose cache cannot be cut back after "
        "rejected drafts; use a model with full attention in every layer"
    )
