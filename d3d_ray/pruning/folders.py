"""The folders of a run, and the drafters in them.

::

    drafter/                      the result
    depths/29/pruned/             29 layers before healing; until the round has ended
    depths/29/healing/drafter/    and healed
    depths/29/control/drafter/    all layers after as much training; the newest one only
"""

import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch

from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter, load_drafter_tokenizer, save_drafter
from d3d_ray.models.loading import load_config
from d3d_ray.models.network import select_layers
from d3d_ray.models.section import SECTION
from d3d_ray.pruning.config import PruningConfig

HEALING, CONTROL = "healing", "control"


class Folders:
    def __init__(self, config: PruningConfig) -> None:
        """Raises ``ValueError`` when there is no drafter to start from."""
        self._config = config
        self._output = Path(config.output)
        self._unpruned = Path(config.drafter)
        stored = load_config(config.drafter)
        if getattr(stored, SECTION, None) is None:
            raise ValueError(
                f"{config.drafter} is not the folder of a trained drafter; train one first and "
                "give the folder drafter/ of that run"
            )
        if config.use_gpu and not torch.cuda.is_available():
            raise ValueError("use_gpu is true, but torch finds no GPU: set use_gpu=null")
        has_gpu = config.use_gpu is not False and torch.cuda.is_available()
        self._device = "cuda" if has_gpu else "cpu"
        self._num_unpruned = int(stored.num_hidden_layers)

    def load_unpruned(self) -> DrafterModel:
        return self.load(self._unpruned)

    def load(self, folder: Path) -> DrafterModel:
        return load_drafter(
            str(folder),
            target_source=self._config.target.source,
            dtype=getattr(torch, self._config.optimiser.dtype),
            device=self._device,
        )

    def pruned(self, num_layers: int) -> Path:
        return self._output / "depths" / str(num_layers) / "pruned"

    def training(self, name: str, num_layers: int) -> Path:
        return self._output / "depths" / str(num_layers) / name

    def trained(self, name: str, num_layers: int) -> Path:
        """The drafter that came out of a healing or of the control's training."""
        if num_layers == self._num_unpruned:
            return self._unpruned
        return self.training(name, num_layers) / "drafter"

    def save_pruned(self, drafter: DrafterModel, kept: Sequence[int]) -> None:
        """Cut the drafter down to these layers, by their index, and write it."""
        select_layers(drafter.network.model, kept)
        layers = tuple(drafter.section.source_layers[index] for index in kept)
        smaller = DrafterModel(
            drafter.network,
            replace(drafter.section, source_layers=layers),
            vocab_size=drafter.vocab_size,
        )
        self._save(smaller, self.pruned(len(kept)))

    def tidy(self, num_layers: int, last: int) -> None:
        """Drop what is large and not needed any more, when the round from ``last`` has ended."""
        shutil.rmtree(self.pruned(num_layers), ignore_errors=True)
        for name in (HEALING, CONTROL):
            checkpoints = self.training(name, num_layers) / "checkpoints"
            shutil.rmtree(checkpoints, ignore_errors=True)
        shutil.rmtree(self.training(CONTROL, last) / "drafter", ignore_errors=True)

    def publish(self, num_layers: int) -> None:
        """The drafter of this depth becomes ``drafter/``."""
        self._save(self.load(self.trained(HEALING, num_layers)), self._output / "drafter")

    def _save(self, drafter: DrafterModel, folder: Path) -> None:
        """Whole or not at all."""
        source = self._config.target.source
        tokenizer = load_drafter_tokenizer(self._config.drafter, target_source=source)
        partial = folder.with_suffix(".partial")
        shutil.rmtree(partial, ignore_errors=True)
        save_drafter(drafter, partial, tokenizer, target_source=source)
        shutil.rmtree(folder, ignore_errors=True)
        partial.rename(folder)
