"""The loop: rank, confirm, remove, heal, measure. After every step the state is on disk."""

import itertools
import logging
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path

import torch

from d3d_ray.config import to_yaml
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.pruning.anchors import Tally, draw_anchors, tokens, without_layers
from d3d_ray.pruning.config import PruningConfig
from d3d_ray.pruning.estimates import Estimate, difference, ratio
from d3d_ray.pruning.folders import CONTROL, HEALING, Folders
from d3d_ray.pruning.report import describe, write_report
from d3d_ray.pruning.state import Depth, Round, State, open_folder, restore
from d3d_ray.pruning.stopping import find_result, num_to_remove
from d3d_ray.pruning.timing import measure_pass_ms
from d3d_ray.training.config import TrainingConfig

logger = logging.getLogger(__name__)

Train = Callable[[TrainingConfig], None]
"""Trains to the end, from the newest checkpoint where there is one; see ``healing.heal``."""


def prune(config: PruningConfig, train: Train, *, resume: bool) -> None:
    """Prune until the stop rule is met; the result is ``drafter/`` in the output folder.

    Raises ``ValueError`` for settings, a drafter, answers or a folder that are wrong.
    """
    stored = open_folder(config, resume=resume)
    pruner = Pruner(config, train)
    pruner.begin(None if stored is None else restore(stored))
    pruner.run()


class Pruner:
    """One run: ``begin`` it, then ``run`` it."""

    def __init__(self, config: PruningConfig, train: Train) -> None:
        self._config, self._train = config, train
        self._folders = Folders(config)
        drafter = self._folders.load_unpruned()
        self._num_unpruned, wanted = drafter.num_layers, config.stop.depth or 1
        if self._num_unpruned <= wanted:
            raise ValueError(
                f"{config.drafter} has {self._num_unpruned} layers, and {wanted} are to stay: give "
                "a smaller stop.depth, or a deeper drafter"
            )
        if drafter.device.type == "cpu":
            torch.set_num_threads(config.threads)
        self._ranking, self._confirming = draw_anchors(config, drafter)
        self._state = State(
            fingerprint=self._ranking.fingerprint + self._confirming.fingerprint,
            counts=self._confirming.counts,
        )

    def begin(self, state: State | None) -> None:
        """With the state of the run that is resumed, if any."""
        if state is None:
            self._save()
            text = to_yaml(self._config)
            (Path(self._config.output) / "config.yaml").write_text(text, encoding="utf-8")
        elif state.fingerprint != self._state.fingerprint:
            raise ValueError(
                f"the documents held out in {self._config.data.files!r} are not those that the run "
                "began with: restore the files, or start anew in another folder"
            )
        else:
            self._state = state

    def run(self) -> None:
        config, state = self._config, self._state
        if not state.depths:
            self._measure_unpruned()
        while (result := find_result(config.stop, state.depths)) is None:
            self._run_round()
        num_layers, reason = result[0].num_layers, result[1]
        if config.stop.pass_ms is not None and num_layers == self._num_unpruned:
            raise ValueError(
                f"stop.pass_ms is {config.stop.pass_ms}, and the unpruned drafter takes {reason}: "
                "give less"
            )
        self._folders.publish(num_layers)
        state.chosen = num_layers
        self._save()
        write_report(config, state)
        logger.info("the end: %s; the result has %d layers", reason, num_layers)

    def _measure_unpruned(self) -> None:
        drafter = self._folders.load_unpruned()
        assert len(drafter.section.source_layers) == drafter.num_layers
        tally = self._confirming.measure(drafter)
        self._add(
            Depth(
                layers=list(drafter.section.source_layers),
                removed=[],
                unhealed=tally,
                healed=tally,
                control=tally if self._config.with_control else None,
                pass_ms=measure_pass_ms(drafter, self._config.timing),
            )
        )

    def _run_round(self) -> None:
        last, current = self._state.depths[-1], self._state.round
        drafter = self._folders.load(self._folders.trained(HEALING, last.num_layers))
        if not current.removed:
            self._rank(drafter, last)
            self._choose(drafter, last)
        if current.unhealed is None:
            current.unhealed = self._measure_without(drafter, last, current.removed)
            self._save()
        layers = [layer for layer in last.layers if layer not in current.removed]
        if current.healed is None:
            self._folders.save_pruned(drafter, _indices(last, layers))
            del drafter  # Healing needs the memory.
            healed = self._heal(HEALING, self._folders.pruned(len(layers)), len(layers))
            current.healed = self._confirming.measure(healed)
            current.pass_ms = measure_pass_ms(healed, self._config.timing)
            self._save()
        if self._config.with_control and current.control is None:
            source = self._folders.trained(CONTROL, last.num_layers)
            control = self._heal(CONTROL, source, len(layers))
            current.control = self._confirming.measure(control)
            self._save()
        self._end_round(layers)
        self._folders.tidy(len(layers), last.num_layers)

    def _end_round(self, layers: list[int]) -> None:
        done, self._state.round = self._state.round, Round()
        assert done.unhealed is not None and done.healed is not None
        counts = tokens(self._ranking.counts)
        self._add(
            Depth(
                layers=layers,
                removed=done.removed,
                unhealed=done.unhealed,
                healed=done.healed,
                control=done.control,
                pass_ms=done.pass_ms,
                ranking=[ratio(tokens(tally), counts).value for tally in done.ranking],
            )
        )

    def _rank(self, drafter: DrafterModel, last: Depth) -> None:
        """Measure the drafter without each layer."""
        ranking, counts = self._state.round.ranking, tokens(self._ranking.counts)
        started, num_known = time.monotonic(), len(ranking)
        for index in range(num_known, last.num_layers):
            with without_layers(drafter.network, {index}):
                ranking.append(self._ranking.measure(drafter))
            self._save()
            if index == num_known:
                seconds = (time.monotonic() - started) * (last.num_layers - num_known)
                logger.info("ranking %d layers takes about %.0f s", last.num_layers, seconds)
            length = ratio(tokens(ranking[-1]), counts)
            logger.info("without layer %d: %s", last.layers[index], length)

    def _choose(self, drafter: DrafterModel, last: Depth) -> None:
        """Confirm the best of the ranking, and take the best of these."""
        config, current = self._config, self._state.round
        num_removed = num_to_remove(config.stop, last, config.layers_per_round)
        ranked = [layer for layer, _ in _best_first(last.layers, current.ranking)]
        num_candidates = max(config.num_confirmed, num_removed, len(current.confirmed))
        candidates = ranked[:num_candidates]
        for layer in candidates[len(current.confirmed) :]:
            tally = self._measure_without(drafter, last, [layer])
            current.confirmed.append(tally)
            self._save()
            change = self._difference(tally, last.healed)
            logger.info("confirmed without layer %d: the length changes by %s", layer, change)
        best = _best_first(candidates, current.confirmed)
        for (one, ones), (other, others) in itertools.pairwise(best):
            gap = self._difference(ones, others)
            logger.info("layer %d is better to remove than %d by %s", one, other, gap)
        current.removed = sorted(layer for layer, _ in best[:num_removed])
        if num_removed == 1:
            current.unhealed = best[0][1]
        self._save()
        logger.info("removed: %s", ", ".join(map(str, current.removed)))

    def _measure_without(
        self, drafter: DrafterModel, depth: Depth, layers: Collection[int]
    ) -> Tally:
        with without_layers(drafter.network, _indices(depth, layers)):
            return self._confirming.measure(drafter)

    def _difference(self, one: Tally, other: Tally) -> Estimate:
        return difference(tokens(one), tokens(other), tokens(self._state.counts))

    def _heal(self, name: str, source: Path, num_layers: int) -> DrafterModel:
        output = self._folders.training(name, num_layers)
        # The number of the round: a drafter and its control see the same rows, each round others.
        config = self._config.healing(source, output, len(self._state.depths))
        logger.info("%s: %d steps from %s", name, config.optimiser.num_steps, source)
        self._train(config)
        return self._folders.load(output / "drafter")

    def _add(self, depth: Depth) -> None:
        self._state.depths.append(depth)
        self._save()
        write_report(self._config, self._state)
        logger.info(describe(depth, self._state))

    def _save(self) -> None:
        self._state.save(self._config)


def _best_first(layers: Sequence[int], without: Sequence[Tally]) -> list[tuple[int, Tally]]:
    """By the acceptance length without the layer; the anchors are all the same."""
    pairs = list(zip(layers, without, strict=True))
    return sorted(pairs, key=lambda pair: -sum(tokens(pair[1])))


def _indices(depth: Depth, layers: Collection[int]) -> list[int]:
    return [index for index, layer in enumerate(depth.layers) if layer in layers]
