"""Checks of the pair itself, from configs and tokenizers alone: does it match, and does it fit?"""

from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Self

import torch
from huggingface_hub import try_to_load_from_cache
from transformers import AutoModelForCausalLM, GenerationConfig, PretrainedConfig

from d3d_ray.bench.check import Check, Status, gigabytes
from d3d_ray.bench.probe import Device
from d3d_ray.bench.shapes import count_kv_bytes, count_weight_bytes, known_shape, with_layers
from d3d_ray.config import EngineConfig
from d3d_ray.models.cache import check_can_cut
from d3d_ray.models.drafter_folder import load_drafter_tokenizer
from d3d_ray.models.embedded import PREFIX
from d3d_ray.models.loading import load_config, load_tokenizer, stop_ids
from d3d_ray.models.network import check_family
from d3d_ray.models.pairing import check_mask_token, check_vocabularies
from d3d_ray.models.section import SECTION

_KV_SHARE = 0.8
"""Of the memory beside the weights; the rest is for activations."""
_MIN_TOKENS = 256
"""With room for fewer tokens than this no request can be served."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Target and drafter, as far as they are on this machine."""

    config: EngineConfig
    """With sources that need no network, where the models are here."""
    target: PretrainedConfig | None
    drafter: PretrainedConfig | None
    missing: str
    """Which model is not here and how to get it; empty when both are."""
    fault: str = ""
    """Why a model that should be here cannot be read."""

    @classmethod
    def find(cls, config: EngineConfig) -> Self:
        sources = [config.target.source, config.drafter.source or config.target.source]
        try:
            folders = [local_source(source) for source in sources]
            configs = [
                known_shape(source) if folder is None else load_config(folder)
                for source, folder in zip(sources, folders, strict=True)
            ]
        except (ValueError, OSError) as error:
            return cls(config, None, None, str(error), fault=str(error))
        lacking = [s for s, f in zip(sources, folders, strict=True) if f is None]
        target, drafter = configs
        if drafter is not None:
            drafter = with_layers(drafter, config.drafter.num_layers)
        if lacking:
            remedy = "; ".join(f"run hf download {source}" for source in dict.fromkeys(lacking))
            missing = f"{' and '.join(dict.fromkeys(lacking))} not on this machine: {remedy}"
            return cls(config, target, drafter, missing)
        assert folders[0] is not None
        own = folders[1] if config.drafter.source is not None else None
        local = replace(
            config,
            target=replace(config.target, source=folders[0]),
            drafter=replace(config.drafter, source=own),
        )
        return cls(local, target, drafter, "")

    @property
    def is_complete(self) -> bool:
        return not self.missing


@dataclass(frozen=True, slots=True, kw_only=True)
class Need:
    """What a model takes of its device."""

    weight_bytes: int
    kv_bytes_per_token: int

    def __add__(self, other: "Need") -> "Need":
        return Need(
            weight_bytes=self.weight_bytes + other.weight_bytes,
            kv_bytes_per_token=self.kv_bytes_per_token + other.kv_bytes_per_token,
        )


def local_source(source: str) -> str | None:
    """The source, or the hub's folder for it, when it can be read without a network."""
    if source.startswith(PREFIX) or Path(source).expanduser().exists():
        return source
    found = try_to_load_from_cache(source, "config.json") if source.count("/") <= 1 else None
    if not isinstance(found, str):
        if source.startswith(("/", ".", "~")) or source.count("/") > 1:
            raise ValueError(f"there is no model folder or .gguf file {source!r}: correct the path")
        return None
    folder = Path(found).parent
    return str(folder) if any(folder.glob("*.safetensors")) else None


def check_pairing(pair: Pair) -> Check:
    """Vocabularies, mask token and kinds of models, without loading weights."""
    if pair.fault:
        return Check(name="pair", status=Status.FAIL, text=pair.fault)
    if not pair.is_complete:
        return Check(name="pair", status=Status.WARN, text=f"not checked: {pair.missing}")
    assert pair.target is not None and pair.drafter is not None
    try:
        mask_token_id = _check_models(pair.config, pair.target, pair.drafter)
    except (ValueError, OSError) as error:
        return Check(name="pair", status=Status.FAIL, text=str(error))
    text = f"the vocabularies agree, and mask token {mask_token_id} stands in no text"
    return Check(name="pair", status=Status.OK, text=text, data={"mask_token_id": mask_token_id})


def _check_models(config: EngineConfig, target: PretrainedConfig, drafter: PretrainedConfig) -> int:
    check_can_cut(target)
    check_family(drafter)
    source = config.target.source
    section = getattr(drafter, SECTION, None) or {} if config.drafter.source else {}
    mask_token_id = config.drafter.mask_token_id
    if mask_token_id is None:
        mask_token_id = section.get("mask_token_id")
    if mask_token_id is None:
        raise ValueError("the drafter does not say its mask_token_id: give drafter.mask_token_id")
    tokenizer = load_tokenizer(source)
    own = load_drafter_tokenizer(config.drafter.source, target_source=source)
    check_vocabularies(tokenizer, own, mask_token_id)
    check_mask_token(
        mask_token_id,
        num_rows=drafter.vocab_size,
        stop_ids=_stop_ids(source, target),
        tokenizer=tokenizer,
    )
    return mask_token_id


def _stop_ids(source: str, config: PretrainedConfig) -> frozenset[int]:
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    if (Path(source) / "generation_config.json").is_file():
        model.generation_config = GenerationConfig.from_pretrained(source)
    return stop_ids(model)


def check_fit(pair: Pair, verifier: Device, drafter: Device) -> Check:
    """Weights and KV caches against the memory of the devices that the actors get."""
    if pair.target is None or pair.drafter is None:
        text = f"not checked: {pair.missing}"
        return Check(name="fit", status=Status.WARN, text=text)
    config = pair.config
    dtype = getattr(torch, config.target.dtype)
    drafter_dtype = getattr(torch, config.drafter.dtype or config.target.dtype)
    needs = {
        "target": _need(pair.target, dtype),
        "drafter": _need(pair.drafter, drafter_dtype),
    }
    rooms = {"target": verifier.free_bytes, "drafter": drafter.free_bytes}
    if verifier.uuid == drafter.uuid and verifier.node_id == drafter.node_id:
        needs = {"target and drafter": needs["target"] + needs["drafter"]}
        rooms = {"target and drafter": min(rooms.values())}
    context = config.target.max_context or pair.target.max_position_embeddings
    return judge_room(needs, rooms, context)


def judge_room(needs: dict[str, Need], rooms: dict[str, int], context: int) -> Check:
    """Each need against its device's free bytes: how many tokens of KV are left?"""
    status, facts = Status.OK, []
    num_tokens: dict[str, int] = {}
    for name, need in needs.items():
        free = rooms[name] - need.weight_bytes
        tokens = max(0, int(_KV_SHARE * free / need.kv_bytes_per_token))
        num_tokens[name] = tokens
        facts.append(
            f"{name}: {gigabytes(need.weight_bytes)} of weights and "
            f"{need.kv_bytes_per_token / 1e6:.3g} MB a token in {gigabytes(rooms[name])} free, "
            f"room for {tokens:,} tokens"
        )
    text = "; ".join(facts)
    fewest = min(num_tokens.values())
    if fewest < _MIN_TOKENS:
        status = Status.FAIL
        text += (
            ": does not fit; use more or larger devices (runtime.verifier_gpus), or another pair"
        )
    elif fewest < context:
        status = Status.WARN
        text += f": less than the context of {context:,}; set target.max_context={fewest}"
    data = {
        "context": context,
        "needs": {name: asdict(need) for name, need in needs.items()},
        "free_bytes": rooms,
        "tokens": num_tokens,
    }
    return Check(name="fit", status=status, text=text, data=data)


def _need(config: PretrainedConfig, dtype: torch.dtype) -> Need:
    return Need(
        weight_bytes=count_weight_bytes(config, dtype),
        kv_bytes_per_token=count_kv_bytes(config, dtype),
    )
