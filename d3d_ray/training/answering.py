"""The target answers prompts in batches: left-padded, with a cache, by our keyed draws."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np
import torch
from transformers.cache_utils import CacheLayerMixin

from d3d_ray.config import TargetConfig
from d3d_ray.models.cache import SlotCache
from d3d_ray.models.loading import load_target
from d3d_ray.models.target import Target, check_token_ids
from d3d_ray.records import Finish, Sampling
from d3d_ray.sampling import NonFiniteLogitsError, noise_keys, perturb
from d3d_ray.training.answer_options import AnswerSettings
from d3d_ray.training.answers_store import AnsweredRow
from d3d_ray.training.questions import Question

_ROWS_AT_ONCE = 256
"""Whose fp32 logits are in memory together, when answers are scored."""


@dataclass(slots=True, eq=False)
class _Row:
    """An answer while it is made."""

    question: Question
    sampling: Sampling
    max_tokens: int
    tokens: list[int] = field(default_factory=list)
    top_ids: list[np.ndarray] = field(default_factory=list)
    top_log_probs: list[np.ndarray] = field(default_factory=list)
    finish: Finish | None = None

    @property
    def position(self) -> int:
        """Of the next token."""
        return len(self.question.prompt_ids) + len(self.tokens)

    def take(self, token: int, stop_ids: frozenset[int]) -> None:
        self.tokens.append(token)
        if token in stop_ids:
            self.finish = Finish.STOP
        elif len(self.tokens) == self.max_tokens:
            self.finish = Finish.LENGTH

    def done(self) -> AnsweredRow:
        assert self.finish is not None
        return AnsweredRow(
            id=self.question.id,
            dataset=self.question.dataset,
            prompt_ids=self.question.prompt_ids,
            answer_ids=tuple(self.tokens),
            finish=self.finish,
            top_ids=np.stack(self.top_ids).astype(np.int32) if self.top_ids else None,
            top_log_probs=np.stack(self.top_log_probs) if self.top_log_probs else None,
        )


class Answerer:
    """A target that answers batches of prompts.

    In fp32 an answer does not depend on its batch. In bf16 a near-tie may fall otherwise.
    """

    def __init__(self, target: Target, settings: AnswerSettings) -> None:
        if settings.num_top > target.vocab_size:
            raise ValueError(
                f"{settings.num_top} top log-probabilities of {target.vocab_size} ids: ask for less"
            )
        self._target = target
        self._settings = settings

    @classmethod
    def load(cls, target: TargetConfig, settings: AnswerSettings, *, num_gpus: int = 1) -> Self:
        """Load the target, on ``num_gpus`` GPUs where there are any."""
        has_gpu = torch.cuda.is_available()
        model = load_target(
            target.source,
            dtype=getattr(torch, target.dtype),
            device="cuda" if has_gpu else "cpu",
            num_devices=num_gpus if has_gpu else 1,
            max_context=target.max_context,
        )
        return cls(model, settings)

    def answer(self, questions: Sequence[Question]) -> list[AnsweredRow]:
        """Answers in the order of the questions; where all have one, they are scored.

        Raises ``ValueError`` for a prompt that leaves no room in the context, and
        :class:`NonFiniteLogitsError` when the model breaks down.
        """
        if all(question.answer_ids is not None for question in questions):
            return [self._score(question) for question in questions]
        rows = [self._begin(question) for question in questions]
        batch = _Batch(self._target, [question.prompt_ids for question in questions])
        active = rows
        while active:
            logits = batch.forward()
            tokens = self._draw(logits, active)
            if self._settings.num_top:
                self._keep_top(logits, active)
            for row, token in zip(active, tokens.tolist(), strict=True):
                row.take(token, self._target.stop_ids)
            kept = [index for index, row in enumerate(active) if row.finish is None]
            if kept:
                batch.extend(tokens, kept)
            active = [active[index] for index in kept]
        return [row.done() for row in rows]

    @torch.inference_mode()
    def _score(self, question: Question) -> AnsweredRow:
        """The target's log-probabilities along an answer, in one forward pass."""
        answer, target = question.answer_ids, self._target
        assert answer
        tokens = (*question.prompt_ids, *answer)
        try:
            check_token_ids(tokens, target.vocab_size)
        except ValueError as error:
            raise ValueError(f"{'/'.join(question.key)}: {error}") from error
        logits = target.model(
            input_ids=torch.tensor([tokens[:-1]], device=target.device),
            use_cache=False,
            logits_to_keep=len(answer),
        ).logits[0, :, : target.vocab_size]
        row = self._begin(question)
        row.tokens = list(answer)
        row.finish = Finish.STOP if answer[-1] in target.stop_ids else Finish.LENGTH
        for piece in logits.split(_ROWS_AT_ONCE):
            self._keep_top(piece.float(), [row] * len(piece))
        return row.done()

    def _begin(self, question: Question) -> _Row:
        room = self._target.max_positions - len(question.prompt_ids)
        if room < 1 or not question.prompt_ids:
            raise ValueError(
                f"the prompt of {'/'.join(question.key)} has {len(question.prompt_ids)} tokens; "
                f"the context of {self._target.max_positions} must hold it and its answer"
            )
        sampling = self._settings.sampling(*question.key)
        return _Row(question, sampling, max_tokens=min(room, self._settings.max_tokens))

    def _draw(
        self,
        logits: torch.Tensor,  # [rows, vocab] fp32
        rows: Sequence[_Row],
    ) -> torch.Tensor:  # [rows] int64
        """As ``sampling.draw``, but with another seed and position in every row."""
        scores = logits
        if self._settings.temperature > 0.0:
            keys = [
                noise_keys(row.sampling.seed or 0, 0, row.position, 1, logits.device)
                for row in rows
            ]
            scores = perturb(logits, torch.cat(keys), rows[0].sampling)
        best, tokens = scores.max(dim=-1)
        _check_finite(best, rows)
        return tokens

    def _keep_top(
        self,
        logits: torch.Tensor,  # [rows, vocab] fp32
        rows: Sequence[_Row],
    ) -> None:
        log_probs, ids = logits.log_softmax(dim=-1).topk(self._settings.num_top, dim=-1)
        _check_finite(log_probs[:, 0], rows)
        for row, row_ids, row_log_probs in zip(
            rows, ids.cpu().numpy(), log_probs.cpu().numpy(), strict=True
        ):
            row.top_ids.append(row_ids)
            row.top_log_probs.append(row_log_probs)


def _check_finite(
    best: torch.Tensor,  # [rows]
    rows: Sequence[_Row],
) -> None:
    if not bool(torch.isfinite(best).all()):
        wrong = rows[int((~torch.isfinite(best)).nonzero()[0])]
        raise NonFiniteLogitsError(
            f"the model gave NaN or infinite logits for {'/'.join(wrong.question.key)} "
            f"at position {wrong.position}"
        )


class _Batch:
    """Prompts of different lengths that go through the model together, and their cache."""

    def __init__(self, target: Target, prompts: Sequence[Sequence[int]]) -> None:
        self._target = target
        self._cache = SlotCache(target.model.config.get_text_config(decoder=True).num_hidden_layers)
        length = max(map(len, prompts))
        num_padding = [length - len(prompt) for prompt in prompts]
        padded = [[*[0] * num, *prompt] for num, prompt in zip(num_padding, prompts, strict=True)]
        self._token_ids = torch.tensor(padded, device=target.device)  # [rows, new]
        columns = torch.arange(length, device=target.device)
        first = torch.tensor(num_padding, device=target.device)[:, None]
        self._mask = (columns >= first).long()  # [rows, seen]
        self._positions = (columns - first).clamp(min=0)  # [rows, new]

    @torch.inference_mode()
    def forward(self) -> torch.Tensor:  # [rows, vocab] fp32
        """The logits behind the newest token of each row."""
        logits: torch.Tensor = self._target.model(
            input_ids=self._token_ids,
            attention_mask=self._mask,
            position_ids=self._positions,
            past_key_values=self._cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        return logits[:, -1, : self._target.vocab_size].float()

    @torch.inference_mode()
    def extend(
        self,
        tokens: torch.Tensor,  # [rows] int64
        kept: Sequence[int],
    ) -> None:
        """Append each row's token, and go on with the ``kept`` rows alone."""
        if len(kept) < len(tokens):
            index = torch.tensor(kept, dtype=torch.long)
            for layer in self._cache.layers:
                assert isinstance(layer, CacheLayerMixin)
                assert layer.keys is not None and layer.values is not None
                layer.keys = layer.keys[index.to(layer.keys.device)]
                layer.values = layer.values[index.to(layer.values.device)]
            tokens = tokens[index.to(tokens.device)]
            index = index.to(self._mask.device)
            self._mask, self._positions = self._mask[index], self._positions[index]
        self._token_ids = tokens[:, None].to(self._mask.device)
        self._mask = torch.nn.functional.pad(self._mask, (0, 1), value=1)
        self._positions = self._positions[:, -1:] + 1
