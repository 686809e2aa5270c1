"""The actor that owns the drafter."""

import asyncio
import gc
import logging
import resource
from dataclasses import replace
from typing import Any

import torch

from d3d_ray.config import DrafterConfig, EngineConfig
from d3d_ray.decode.drafting import DraftWorker
from d3d_ray.decode.lookahead_plans import AnytimePlan, GlueFirstPlan
from d3d_ray.decode.packed_plan import PackedPlan
from d3d_ray.decode.plans import DraftPlan, NoPlan
from d3d_ray.decode.simulation import SimulatedPlan
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter, load_drafter_tokenizer
from d3d_ray.models.loading import load_tokenizer
from d3d_ray.models.pairing import check_pair
from d3d_ray.records import FromDrafter
from d3d_ray.runtime.actor import ActorInfo, LinkedActor
from d3d_ray.runtime.placement import available_memory

logger = logging.getLogger(__name__)


class DrafterActor(LinkedActor):
    """Owns the drafter; knows nothing of a request but committed tokens and sampling."""

    async def load(self) -> ActorInfo:
        """Load the model and start to draft; raises what the loading raises."""
        self._model: DrafterModel | None = load_drafter_of(self._config, self._device)
        self._worker = DraftWorker(make_plan(self._config, self._model), self._send)
        self._start(self._worker.step, "draft thread")
        return self._describe()

    def _describe(self) -> ActorInfo:
        assert self._model is not None
        return self._info(
            vocab_size=self._model.vocab_size,
            max_positions=self._model.max_positions,
            block_size=self._model.block_size,
            num_layers=self._model.num_layers,
            is_trained=self._model.is_trained,
        )

    async def check_pair(self, target: ActorInfo) -> None:
        """Raise ``ValueError`` when this drafter does not fit the target."""
        assert self._model is not None
        _check_pair(self._config, self._model, target)

    async def swap(self, drafter: DrafterConfig, target: ActorInfo) -> ActorInfo:
        """Load another drafter and draft with it from the next block on, in the middle of answers.

        The present one drafts until the other is there. Where there is no memory for both it goes
        first, the verifier decodes plainly meanwhile, and it comes back if the other fails.
        Raises ``ValueError`` when the other cannot be loaded or does not fit the target.
        """
        config = replace(self._config, drafter=drafter)
        try:
            model = await asyncio.to_thread(self._load_beside, config, target)
            if model is None:
                model = await asyncio.to_thread(self._load_instead, config, target)
        except Exception as error:
            raise ValueError(
                f"{drafter.source} cannot draft here, so the drafter stays: {error}"
            ) from None
        await asyncio.to_thread(self._use, config, model)
        return self._describe()

    def _load_beside(self, config: EngineConfig, target: ActorInfo) -> DrafterModel | None:
        """None: there is no memory for a second model."""
        # Its peak, loading included; on Linux in KiB.
        peak_bytes = 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        if self._device.type == "cpu" and available_memory() < peak_bytes:
            return None
        try:
            return _load_checked(config, self._device, target)
        except torch.OutOfMemoryError:
            return None

    def _load_instead(self, config: EngineConfig, target: ActorInfo) -> DrafterModel:
        logger.warning("no memory for two drafters: decoding plainly while another is loaded")
        self._use(self._config, None)
        try:
            return _load_checked(config, self._device, target)
        except Exception as error:
            failure = error.with_traceback(None)  # Its frames hold what was loaded already.
        try:
            self._use(self._config, load_drafter_of(self._config, self._device))
        except Exception as error:
            self._failure = error  # The next ping tells, and this actor is replaced.
        raise failure

    def _use(self, config: EngineConfig, model: DrafterModel | None) -> None:
        self._worker.use(NoPlan() if model is None else make_plan(config, model))
        self._config, self._model = config, model
        gc.unfreeze()  # Or what is left of the last model would stay for good.
        gc.collect()
        gc.freeze()
        if self._device.type == "cuda":
            torch.cuda.empty_cache()

    async def counters(self) -> dict[str, int]:
        worker = self._worker
        return {"passes": worker.num_passes, "sent": worker.num_sent, "unsent": worker.num_unsent}

    def _num_served(self) -> int:
        return self._worker.num_sent

    async def accept_link(self, channel: Any) -> None:
        await super().accept_link(channel)
        # Now the old link is closed; a verifier at a new one tells everything anew, once attached.
        self._worker.reset()

    def _receive(self, message: Any) -> None:
        self._worker.receive(message)

    def _send(self, message: FromDrafter) -> bool:
        return self._sender is not None and self._sender.put(message)


def _load_checked(config: EngineConfig, device: torch.device, target: ActorInfo) -> DrafterModel:
    model = load_drafter_of(config, device)
    _check_pair(config, model, target)
    return model


def _check_pair(config: EngineConfig, model: DrafterModel, target: ActorInfo) -> None:
    source = config.target.source
    own_tokenizer = load_drafter_tokenizer(config.drafter.source, target_source=source)
    check_pair(target, model, load_tokenizer(source), own_tokenizer)


def load_drafter_of(config: EngineConfig, device: torch.device) -> DrafterModel:
    """The drafter that the settings ask for."""
    settings = config.drafter
    drafter = load_drafter(
        settings.source,
        target_source=config.target.source,
        num_layers=settings.num_layers,
        block_size=settings.block_size,
        mask_token_id=settings.mask_token_id,
        label_shift=settings.label_shift,
        dtype=getattr(torch, settings.dtype or config.target.dtype),
        device=device,
    )
    drafter.fuse()
    return drafter


def make_plan(config: EngineConfig, model: DrafterModel) -> DraftPlan:
    """The draft plan that the settings ask for."""
    decode = config.decode
    rows, is_shared = decode.max_draft_rows, decode.draft_noise == "shared"
    plan: DraftPlan
    match decode.draft_plan:
        case "packed":
            plan = PackedPlan(model, max_rows=rows, is_noise_shared=is_shared)
        case "glue-first":
            plan = GlueFirstPlan(model, max_rows=rows, is_noise_shared=is_shared)
        case "anytime":
            plan = AnytimePlan(
                model, max_rows=rows, is_noise_shared=is_shared, max_passes=decode.max_passes
            )
    if decode.simulate_acceptance is None:
        return plan
    return SimulatedPlan(
        plan,
        acceptance=decode.simulate_acceptance,
        block_size=model.block_size,
        vocab_size=model.vocab_size,
    )
