"""The target behind the ``Verifier`` protocol: any causal LM whose KV cache can be cut back."""

from collections.abc import Sequence
from typing import Protocol

import torch
from transformers import PreTrainedModel

from d3d_ray.models.cache import SlotCache, align_up, check_can_cut
from d3d_ray.models.features import capture, join

_ALIGN = 64


class _Block(Protocol):
    """``decode.protocols.Block``, which this lower layer does not import."""

    @property
    def request(self) -> str: ...
    @property
    def start(self) -> int: ...
    @property
    def tokens(self) -> tuple[int, ...]: ...
    @property
    def num_logits(self) -> int: ...
    @property
    def is_read(self) -> bool: ...


class Reader(Protocol):
    """Takes the outputs of some of the target's layers."""

    @property
    def layer_ids(self) -> Sequence[int]: ...
    @property
    def device(self) -> torch.device: ...

    def read(
        self,
        request: str,
        start: int,
        features: torch.Tensor,  # [rows, layers · hidden]
    ) -> None:
        """Those of the tokens from ``start`` on."""
        ...

    def free(self, request: str) -> None: ...


class Target:
    """A causal LM and its KV caches, one a request.

    ``vocab_size`` counts the tokenizer's ids: logits are cut to it, so that the padding rows of
    the embedding table are never emitted. Raises ``ValueError`` for a model whose cache cannot be
    cut back.

    With :meth:`fix_rows` a row's logits are the same bits in whatever block it is run: every block
    has the same number of rows and attention reads a multiple of 64 entries, so the same kernels
    add the same numbers in the same order. Then bf16, too, gives the same tokens in every mode.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        vocab_size: int,
        stop_ids: frozenset[int] = frozenset(),
        max_context: int | None = None,
    ) -> None:
        check_can_cut(model.config)
        config = model.config.get_text_config(decoder=True)
        self.model = model.eval()
        self.vocab_size = min(vocab_size, config.vocab_size)
        # An id that is never emitted stops nothing, and has no logit to be forbidden.
        self.stop_ids = frozenset(id_ for id_ in stop_ids if id_ < self.vocab_size)
        self.max_positions = _max_positions(
            getattr(config, "max_position_embeddings", None), max_context
        )
        self._num_layers: int = config.num_hidden_layers
        self._num_rows: int | None = None
        self._caches: dict[str, SlotCache] = {}
        self._reader: Reader | None = None
        self.kv_bytes_per_token = self._probe()

    @property
    def device(self) -> torch.device:
        """Where token ids go in; a model on several devices gives its logits on another one."""
        device: torch.device = self.model.device
        return device

    def forward(self, blocks: Sequence[_Block]) -> list[torch.Tensor]:  # each [num_logits, vocab]
        """Run the blocks and extend their caches; see ``Verifier.forward``.

        Raises ``ValueError`` for a block that is empty, does not start where its cache ends,
        reaches beyond ``max_positions`` or holds an id outside [0, ``vocab_size``).
        """
        for block in blocks:
            self._check(block)
        results = []
        for block in blocks:
            if block.request not in self._caches:
                self._caches[block.request] = self._new_cache()
            results.append(self._run_block(self._caches[block.request], block))
        return results

    def read_with(self, reader: Reader) -> None:
        """Show the outputs of layers to ``reader``, for blocks that say so; others cost nothing."""
        self._reader = reader

    def _run_block(self, cache: SlotCache, block: _Block) -> torch.Tensor:
        reader = self._reader
        if reader is None or not block.is_read:
            return self._run(cache, block.tokens, block.num_logits)
        with capture(self.model, reader.layer_ids) as outputs:
            logits = self._run(cache, block.tokens, block.num_logits)
        features = join(outputs, reader.layer_ids, reader.device)
        reader.read(block.request, block.start, features[: len(block.tokens)])
        return logits

    def fix_rows(self, num_rows: int) -> None:
        """Run every block with ``num_rows`` rows from now on, padding shorter ones.

        Raises ``ValueError`` for a model that does not take a mask of ours.
        """
        assert not self._caches, "no request may be in flight"
        tokens = tuple(range(min(4, self.vocab_size)))
        plain = self._run(self._new_cache(), tokens, len(tokens)).float()
        self._num_rows = num_rows
        fixed = self._run(self._new_cache(), tokens, len(tokens)).float()
        if not torch.allclose(fixed, plain, atol=0.05 * float(plain.abs().max()), rtol=0.0):
            raise ValueError(
                f"{self.model.config.model_type!r} does not honour a 4D attention mask; set "
                "target.fixed_rows=false"
            )

    def _new_cache(self) -> SlotCache:
        return SlotCache(self._num_layers, align=_ALIGN if self._num_rows else 1)

    def cut(self, request: str, length: int) -> None:
        """Keep the first ``length`` entries of the request's cache."""
        self._caches[request].cut(length)

    def free(self, request: str) -> None:
        """Forget the request; unknown ones are ignored."""
        self._caches.pop(request, None)
        if self._reader is not None:
            self._reader.free(request)

    def _check(self, block: _Block) -> None:
        cache = self._caches.get(block.request)
        num_cached = 0 if cache is None else cache.length
        if block.start != num_cached:
            raise ValueError(
                f"request {block.request!r}: the block starts at {block.start}, "
                f"its cache holds {num_cached} tokens"
            )
        if not 0 <= block.num_logits <= len(block.tokens) or not block.tokens:
            raise ValueError(
                f"request {block.request!r}: {block.num_logits} logits of {len(block.tokens)} rows"
            )
        if block.start + len(block.tokens) > self.max_positions:
            raise ValueError(
                f"request {block.request!r}: {block.start} + {len(block.tokens)} tokens do not fit "
                f"in the context of {self.max_positions}; send a shorter prompt or block"
            )
        check_token_ids(block.tokens, self.vocab_size)

    def _run(
        self, cache: SlotCache, tokens: tuple[int, ...], num_logits: int
    ) -> torch.Tensor:  # [num_logits, vocab]
        start = cache.length
        num_padding = max(0, (self._num_rows or 0) - len(tokens)) if num_logits else 0
        padded = (*tokens, *[0] * num_padding)
        with torch.inference_mode():
            positions = torch.arange(start, start + len(padded), device=self.device)
            inputs = {
                "input_ids": torch.tensor([padded], device=self.device),
                "position_ids": positions.clamp(max=self.max_positions - 1)[None],
                "past_key_values": cache,
                "use_cache": True,
            }
            if self._num_rows is not None:
                columns = torch.arange(align_up(start + len(padded), _ALIGN), device=self.device)
                inputs["attention_mask"] = (columns <= positions[:, None])[None, None]
            if num_logits == 0:
                self.model.base_model(**inputs)
                return torch.empty(0, self.vocab_size, dtype=self.model.dtype, device=self.device)
            logits: torch.Tensor = self.model(
                **inputs, logits_to_keep=num_logits + num_padding
            ).logits
        if num_padding:
            cache.cut(start + len(tokens))
        return logits[0, :num_logits, : self.vocab_size]

    def _probe(self) -> int:
        """Run one token: how many bytes does it cost, and does the model keep to our cache?"""
        cache = self._new_cache()
        self._run(cache, tokens=(0,), num_logits=1)
        if not cache.is_filled:
            raise ValueError(
                f"{self.model.config.model_type!r} does not keep one key and value per layer and "
                "token, so its cache cannot be cut back; use a model with full attention in "
                "every layer"
            )
        return cache.bytes_per_token


def check_token_ids(tokens: Sequence[int], vocab_size: int) -> None:
    """Raise ``ValueError`` on an id outside [0, ``vocab_size``)."""
    wrong = next((token for token in tokens if not 0 <= token < vocab_size), None)
    if wrong is not None:
        raise ValueError(f"token id {wrong} is outside the vocabulary [0, {vocab_size})")


def _max_positions(of_model: int | None, max_context: int | None) -> int:
    limits = [limit for limit in (of_model, max_context) if limit is not None]
    if not limits:
        raise ValueError("the model's config gives no context length; set target.max_context")
    return min(limits)
