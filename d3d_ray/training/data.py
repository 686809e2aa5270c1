"""Answers of the target as a stream of packed rows, in an order that a resumed run repeats.

Files are shuffled by (seed, epoch) and read in groups; the documents of a group are shuffled
together and packed in that order into rows of up to ``row_tokens`` clean tokens. Every worker
reads the same rows and takes every n-th, so the sequence does not depend on the number of workers.
"""

import hashlib
import logging
from array import array
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from random import Random

import torch

from d3d_ray.training.config import DataConfig
from d3d_ray.training.files import find_files, read_records
from d3d_ray.training.layout import BlockShape, Document, TrainingRow, lay_out

logger = logging.getLogger(__name__)

_NGRAM = 8


@dataclass(frozen=True, slots=True)
class Position:
    """Where the next row starts."""

    epoch: int = 0
    group: int = 0
    document: int = 0
    """Within the group, in its shuffled order."""
    row: int = 0
    """Over all epochs."""


@dataclass(frozen=True, slots=True)
class _Record:
    id: str
    prompt: "array[int]"
    answer: "array[int]"
    top_ids: torch.Tensor | None
    top_log_probs: torch.Tensor | None


class RowStream:
    """The rows of a run, for ever. ``position`` is that of the next one.

    Raises ``ValueError`` for files that are missing or malformed, and when no document is left.
    """

    def __init__(
        self,
        config: DataConfig,
        shape: BlockShape,
        *,
        seed: int,
        with_soft_targets: bool = False,
        position: Position | None = None,
    ) -> None:
        self._config = config
        self._shape = shape
        self._seed = seed
        self._with_soft_targets = with_soft_targets
        self._files = find_files(config.files)
        self.position = position or Position()
        self.counts: Counter[str] = Counter()
        """Documents left out, by reason, each time that they come by."""
        self._documents = self._draw(self.position)
        self._next: tuple[Document, Position] | None = None

    def take(self) -> list[Document]:
        """The documents of the next row."""
        row: list[Document] = []
        num_tokens = 0
        at = self.position
        while True:
            if self._next is None:
                self._next = next(self._documents)
            document, behind = self._next
            num_tokens += len(document.prompt) + len(document.answer)
            if row and num_tokens > self._config.row_tokens:
                break
            row.append(document)
            at, self._next = behind, None
        self.position = replace(at, row=self.position.row + 1)
        return row

    def lay_out(self, documents: Sequence[Document], row: int) -> TrainingRow:
        """Row number ``row``; its anchors depend on that number and the seed alone."""
        return lay_out(
            documents,
            self._shape,
            num_anchors=self._config.num_anchors,
            seeded_share=self._config.seeded_share,
            rng=Random(f"{self._seed}/anchors/{row}"),
        )

    def _draw(self, position: Position) -> Iterator[tuple[Document, Position]]:
        """Documents from a position on, each with the position behind it."""
        epoch, first_group, first = position.epoch, position.group, position.document
        while True:
            groups = self._groups(epoch)
            is_empty = first_group == 0 and first == 0
            for number in range(first_group, len(groups)):
                records = self._load(groups[number], Random(f"{self._seed}/{epoch}/{number}"))
                for index in range(first, len(records)):
                    document = self._cut(records[index])
                    if document is not None:
                        is_empty = False
                        yield document, Position(epoch, number, index + 1)
                first = 0
            if is_empty:
                raise ValueError(
                    f"{self._config.files!r} holds no document to train on: {dict(self.counts)} "
                    "were left out; lengthen data.row_tokens or give other files"
                )
            epoch, first_group = epoch + 1, 0

    def _groups(self, epoch: int) -> list[list[Path]]:
        files = list(self._files)
        Random(f"{self._seed}/{epoch}").shuffle(files)
        size = self._config.shards_in_memory
        return [files[first : first + size] for first in range(0, len(files), size)]

    def _load(self, files: Sequence[Path], rng: Random) -> list[_Record]:
        records = []
        for file in files:
            for record in _read(file, self._shape.mask_token_id, self._with_soft_targets):
                if is_heldout(record.id, self._config.heldout_share):
                    continue
                if self._config.loop_filter and is_looping(record.answer):
                    self.counts["loops"] += 1
                    continue
                records.append(record)
        rng.shuffle(records)
        return records

    def _cut(self, record: _Record) -> Document | None:
        num_left = self._config.row_tokens - len(record.prompt)
        if num_left < 1 or not record.answer or not record.prompt:
            self.counts["too long" if num_left < 1 else "empty"] += 1
            return None
        return Document(
            tuple(record.prompt),
            tuple(record.answer[:num_left]),
            None if record.top_ids is None else record.top_ids[:num_left].long(),
            None if record.top_log_probs is None else record.top_log_probs[:num_left].float(),
        )


def read_heldout(config: DataConfig, mask_token_id: int, num_documents: int) -> list[Document]:
    """The first documents that training never sees, whole.

    Raises ``ValueError`` when there is none.
    """
    documents: list[Document] = []
    for file in find_files(config.files):
        for record in _read(file, mask_token_id, with_soft_targets=False):
            if is_heldout(record.id, config.heldout_share) and record.prompt and record.answer:
                documents.append(Document(tuple(record.prompt), tuple(record.answer)))
            if len(documents) == num_documents:
                return documents
    if not documents:
        raise ValueError(
            "no document is held out to evaluate on: raise data.heldout_share (now "
            f"{config.heldout_share}) or set evaluation.every=null"
        )
    return documents


def count_answer_tokens(config: DataConfig, mask_token_id: int) -> Counter[int]:
    """How often each token stands in the answers to train on; equal counts by the lower id."""
    counts: Counter[int] = Counter()
    for file in find_files(config.files):
        for record in _read(file, mask_token_id, with_soft_targets=False):
            if not is_heldout(record.id, config.heldout_share):
                counts.update(record.answer)
    return Counter(dict(sorted(counts.items())))


def is_heldout(id_: str, share: float) -> bool:
    digest = hashlib.sha256(id_.encode()).digest()
    return int.from_bytes(digest[:8], "big") < share * 2**64


def is_looping(tokens: Sequence[int]) -> bool:
    """More than half of the 8-grams have been there before: easy to draft, and no use to learn."""
    grams = [tuple(tokens[at : at + _NGRAM]) for at in range(len(tokens) - _NGRAM + 1)]
    return len(set(grams)) * 2 < len(grams)


def _read(file: Path, mask_token_id: int, with_soft_targets: bool) -> Iterator[_Record]:
    for where, data in read_records(file):
        top_ids = top_log_probs = None
        try:
            id_, prompt, answer = str(data["id"]), data["prompt_ids"], data["answer_ids"]
            prompt, answer = array("i", prompt), array("i", answer)
            if with_soft_targets:
                top_ids = torch.tensor(data["top_ids"], dtype=torch.int32)
                top_log_probs = torch.tensor(data["top_log_probs"], dtype=torch.float16)
                if top_ids.ndim == 1 and answer and len(top_ids) % len(answer) == 0:
                    top_ids = top_ids.reshape(len(answer), -1)  # Parquet shards hold them flat.
        except (KeyError, TypeError, OverflowError) as error:
            raise ValueError(
                f"{where} lacks {error}: a row has id, prompt_ids and answer_ids, and for "
                "objective.soft_weight > 0 also top_ids and top_log_probs"
            ) from error
        if mask_token_id in prompt or mask_token_id in answer:
            raise ValueError(
                f"{where} holds the mask token {mask_token_id}; set drafter.mask_token_id to a "
                "token that no text uses"
            )
        if top_ids is not None and top_log_probs is not None:
            if len(top_ids) != len(answer) or top_log_probs.numel() != top_ids.numel():
                raise ValueError(
                    f"{where} has {len(top_ids)} top_ids for {len(answer)} tokens, and "
                    f"{top_log_probs.numel()} top_log_probs for {top_ids.numel()} ids"
                )
            top_log_probs = top_log_probs.reshape(top_ids.shape)
        yield _Record(id_, prompt, answer, top_ids, top_log_probs)
