"""What the first worker does with gathered weights: exports them, and judges them."""

import copy
import functools
import logging
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch

from d3d_ray.config import to_dict
from d3d_ray.models.dflash_drafter import DFlashDrafter
from d3d_ray.models.dflash_folder import save_dflash
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter_tokenizer, save_drafter
from d3d_ray.models.loading import load_config, load_target, load_tokenizer
from d3d_ray.models.pairing import check_pair
from d3d_ray.records import Mode
from d3d_ray.training.checkpoints import list_checkpoints, newest_checkpoint
from d3d_ray.training.config import TrainingConfig, load_training_config
from d3d_ray.training.data import read_heldout
from d3d_ray.training.dflash import dflash_shape, judge_dflash
from d3d_ray.training.evaluation import ALARM_RATIO, block_shape, served_length, teacher_forced
from d3d_ray.training.layout import BlockShape
from d3d_ray.training.recording import Figures
from d3d_ray.training.setup import AnyDrafter

logger = logging.getLogger(__name__)

_FREE = {
    "output",
    "num_steps",
    "threads",
    "checkpoint_every",
    "log_every",
    "max_failures",
    "wandb",
    "use_gpu",
}
"""Settings that may change when a run goes on, beside those of the evaluation."""


def check_output(config: TrainingConfig, *, resume: bool) -> None:
    """Raise ``ValueError`` when the output folder does not fit what is asked for.

    A new run needs a folder without checkpoints; a resumed one the same settings as before, but
    for its length and what it reports.
    """
    output = Path(config.output)
    checkpoints = output / "checkpoints"
    if not resume:
        if list_checkpoints(checkpoints):
            raise ValueError(
                f"{output} holds the checkpoints of a run: add --resume to go on with it, or set "
                "output to another folder"
            )
        return
    newest_checkpoint(checkpoints)
    stored = output / "config.yaml"
    if not stored.is_file():
        raise ValueError(f"{stored} is missing: a run cannot go on without its settings")
    old, new = _flatten(load_training_config(str(stored))), _flatten(config)
    changed = [path for path in new if new[path] != old[path] and not _is_free(path)]
    if changed:
        raise ValueError(
            f"a resumed run keeps its settings, but {changed[0]} was {old[changed[0]]!r} and is "
            f"{new[changed[0]]!r} now: set it back, or start a new run from the exported drafter"
        )


def _is_free(path: str) -> bool:
    return path.startswith("evaluation.") or path.rpartition(".")[2] in _FREE


def _flatten(config: TrainingConfig) -> dict[str, object]:
    flat: dict[str, object] = {}
    for name, value in to_dict(config).items():
        items = {f"{name}.{k}": v for k, v in value.items()} if isinstance(value, dict) else None
        flat |= {name: value} if items is None else items
    return flat


class Exporter:
    """Writes ``drafter/`` in the output folder, whole or not at all."""

    def __init__(self, config: TrainingConfig, drafter: AnyDrafter) -> None:
        self._folder = Path(config.output) / "drafter"
        self._save = _make_saver(config, drafter)

    def export(self) -> None:
        partial, old = self._folder.with_suffix(".partial"), self._folder.with_suffix(".old")
        shutil.rmtree(partial, ignore_errors=True)
        self._save(partial)
        shutil.rmtree(old, ignore_errors=True)
        if self._folder.exists():
            self._folder.rename(old)
        partial.rename(self._folder)
        shutil.rmtree(old, ignore_errors=True)


class Critic:
    """Serves the drafter on documents held out of training."""

    def __init__(self, config: TrainingConfig, drafter: AnyDrafter) -> None:
        self._config = config.evaluation
        num_documents = max(self._config.num_documents, self._config.num_prompts)
        self._documents = read_heldout(config.data, drafter.mask_token_id, num_documents)
        self._drafter = drafter
        self._target = load_target(
            config.target.source,
            dtype=getattr(torch, config.target.dtype),
            device=drafter.device,
            max_context=config.target.max_context,
        )
        if isinstance(drafter, DFlashDrafter):
            drafter.target = self._target.model
            self._target.read_with(drafter)
        else:
            source = config.target.source
            own = load_drafter_tokenizer(config.drafter.source, target_source=source)
            check_pair(self._target, drafter, load_tokenizer(source), own)
        if config.target.fixed_rows:
            self._target.fix_rows(drafter.block_size)

    def judge(self) -> Figures:
        documents = self._documents[: self._config.num_documents]
        figures: dict[str, float | Sequence[float] | bool] = {}
        if isinstance(self._drafter, DFlashDrafter):
            length, accuracies = judge_dflash(self._drafter, documents)
            served = figures["served_dflash"] = self._serve(Mode.DFLASH)
            figures |= {"teacher_forced": length, "draft_accuracies": accuracies}
        else:
            forced = teacher_forced(self._drafter, documents)
            length = forced.known_anchor
            served = figures["served_sync"] = self._serve(Mode.SYNC)
            figures["served_async"] = self._serve(Mode.ASYNC)
            figures |= {
                "teacher_forced": length,
                "teacher_forced_mask_first": forced.mask_first,
                "ar_accuracy": forced.ar_accuracy,
                "foretold_share": forced.foretold_share,
                "draft_accuracies": forced.draft_accuracies,
            }
        is_low = served < ALARM_RATIO * length
        if is_low:
            logger.warning(
                "ALARM: the served acceptance length is %.2f, teacher-forced %.2f: serving and "
                "training do not agree",
                served,
                length,
            )
        return {**figures, "alarm": is_low}

    def _serve(self, mode: Mode) -> float:
        prompts = [document.prompt for document in self._documents[: self._config.num_prompts]]
        return served_length(
            self._target,
            self._drafter,
            prompts,
            mode=mode,
            max_tokens=self._config.max_tokens,
        )


def shape_of(drafter: AnyDrafter) -> BlockShape:
    return dflash_shape(drafter) if isinstance(drafter, DFlashDrafter) else block_shape(drafter)


def copy_drafter(drafter: AnyDrafter, device: torch.device) -> AnyDrafter:
    """A second drafter of the same weights, marked as trained."""
    if isinstance(drafter, DFlashDrafter):
        copied = copy.deepcopy(drafter.network).requires_grad_(False).to(device)
        copied.config._attn_implementation = "sdpa"
        return DFlashDrafter(copied, drafter.section, drafter.target, vocab_size=drafter.vocab_size)
    network = copy.deepcopy(drafter.network).requires_grad_(False).to(device)
    section = replace(drafter.section, is_trained=True)
    return DrafterModel(network, section, vocab_size=drafter.vocab_size)


def _make_saver(config: TrainingConfig, drafter: AnyDrafter) -> Callable[[Path], None]:
    if isinstance(drafter, DFlashDrafter):
        return functools.partial(save_dflash, drafter)
    source = config.target.source
    tokenizer = load_drafter_tokenizer(config.drafter.source, target_source=source)
    target_source = source if _may_share(config, drafter) else None

    def save(folder: Path) -> None:
        save_drafter(drafter, folder, tokenizer, target_source=target_source)

    return save


def _may_share(config: TrainingConfig, drafter: DrafterModel) -> bool:
    target, own = load_config(config.target.source), drafter.network.config
    shapes = [(c.vocab_size, c.hidden_size) for c in (target.get_text_config(decoder=True), own)]
    return shapes[0] == shapes[1]
