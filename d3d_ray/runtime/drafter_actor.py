"""The actor that owns the drafter."""

from typing import Any

import torch

from d3d_ray.config import EngineConfig
from d3d_ray.decode.drafting import DraftWorker
from d3d_ray.decode.lookahead_plans import AnytimePlan, GlueFirstPlan
from d3d_ray.decode.packed_plan import PackedPlan
from d3d_ray.decode.plans import DraftPlan
from d3d_ray.decode.simulation import SimulatedPlan
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.drafter_folder import load_drafter, load_drafter_tokenizer
from d3d_ray.models.loading import load_tokenizer
from d3d_ray.models.pairing import check_pair
from d3d_ray.records import FromDrafter
from d3d_ray.runtime.actor import ActorInfo, LinkedActor


class DrafterActor(LinkedActor):
    """Owns the drafter; knows nothing of a request but committed tokens and sampling."""

    async def load(self) -> ActorInfo:
        """Load the model and start to draft; raises what the loading raises."""
        self._model = load_drafter_of(self._config, self._device)
        self._worker = DraftWorker(make_plan(self._config, self._model), self._send)
        self._start(self._worker.step, "draft thread")
        return self._info(
            vocab_size=self._model.vocab_size,
            max_positions=self._model.max_positions,
            block_size=self._model.block_size,
            num_layers=self._model.num_layers,
            is_trained=self._model.is_trained,
        )

    async def check_pair(self, target: ActorInfo) -> None:
        """Raise ``ValueError`` when this drafter does not fit the target."""
        source = self._config.target.source
        own_tokenizer = load_drafter_tokenizer(self._config.drafter.source, target_source=source)
        check_pair(target, self._model, load_tokenizer(source), own_tokenizer)

    async def counters(self) -> dict[str, int]:
        return {"passes": self._worker.num_passes, "unsent": self._worker.num_unsent}

    async def accept_link(self, channel: Any) -> None:
        await super().accept_link(channel)
        # Now the old link is closed; a verifier at a new one tells everything anew, once attached.
        self._worker.reset()

    def _receive(self, message: Any) -> None:
        self._worker.receive(message)

    def _send(self, message: FromDrafter) -> bool:
        return self._sender is not None and self._sender.put(message)


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
