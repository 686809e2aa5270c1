"""The GPU path in minutes: models of full size with random weights, one after the other.

Nothing is loaded. Per target: block decoding against plain decoding, and T_verify. Per drafter:
packed branches against the same branches alone (the first drafter only), and T_draft. The same
code runs with tiny models on a CPU, where it is tested.
"""

import gc
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import torch
from transformers import PretrainedConfig

from d3d_ray.bench.check import Check, Status, gigabytes
from d3d_ray.bench.curves import Curve, Deadline, draft_curve, synchronise, verify_curve
from d3d_ray.bench.identity import compare_decoding
from d3d_ray.bench.packed_alone import compare_packing
from d3d_ray.bench.shapes import (
    QWEN3_MASK,
    build_random,
    count_kv_bytes,
    count_weight_bytes,
    known_shape,
)
from d3d_ray.models.drafter import DrafterModel
from d3d_ray.models.network import DrafterNetwork
from d3d_ray.models.section import DrafterSection
from d3d_ray.models.target import Target
from d3d_ray.runtime.placement import available_memory

_SPARE_BYTES = 2 * 10**9
"""For activations, logits and the CUDA context."""
_MIN_SECONDS = 15.0
"""With less time left no further model is built."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckPlan:
    """Which models to build, and what to do with them."""

    targets: Mapping[str, PretrainedConfig]
    drafters: Mapping[str, PretrainedConfig]
    dtype: torch.dtype = torch.bfloat16
    block_size: int = 16
    mask_token_id: int = QWEN3_MASK
    num_prompt: int = 64
    num_tokens: int = 64
    num_cached: tuple[int, ...] = (256, 2048)
    verify_rows: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    draft_rows: tuple[int, ...] = (16, 32, 64, 128, 256, 512)
    spare_bytes: int = _SPARE_BYTES
    min_seconds: float = _MIN_SECONDS


def _shapes(*names: str) -> dict[str, PretrainedConfig]:
    return {name: config for name in names if (config := known_shape(name)) is not None}


FULL = CheckPlan(
    targets=_shapes("Qwen/Qwen3-8B", "Qwen/Qwen3-32B"),
    drafters=_shapes("Qwen/Qwen3-1.7B", "Qwen/Qwen3-8B"),
)


def gpu_check(plan: CheckPlan, *, device: torch.device, seconds: float = 280.0) -> Iterator[Check]:
    """Make all checks of the plan within a time budget; what is left out is said to be so."""
    deadline = Deadline(seconds)
    for name, config in plan.targets.items():
        yield from _with_model(f"target {name}", config, plan, device, deadline, _check_target)
    for index, (name, config) in enumerate(plan.drafters.items()):
        check = _check_first_drafter if index == 0 else _check_drafter
        yield from _with_model(f"drafter {name}", config, plan, device, deadline, check)


_ModelCheck = Callable[[str, PretrainedConfig, CheckPlan, torch.device, Deadline], Iterator[Check]]


def _with_model(
    name: str,
    config: PretrainedConfig,
    plan: CheckPlan,
    device: torch.device,
    deadline: Deadline,
    check: _ModelCheck,
) -> Iterator[Check]:
    """Run one model's checks, if time and memory are left; then give its memory back."""
    lack = _lack(config, plan, device, deadline)
    if lack:
        yield Check(name=name, status=Status.WARN, text=f"skipped: {lack}", data={"skipped": True})
        return
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    start = time.monotonic()
    try:
        yield from check(name, config, plan, device, deadline)
    except RuntimeError as error:  # Out of memory, a kernel that fails, a request that ends so.
        reason = str(error).partition("\n")[0]
        yield Check(name=name, status=Status.FAIL, text=f"{type(error).__name__}: {reason}")
    peak = torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
    seconds = time.monotonic() - start
    text = f"{seconds:.1f} s" + (f", peak memory {gigabytes(peak)}" if peak is not None else "")
    data = {"seconds": seconds, "peak_bytes": peak, "seconds_left": deadline.seconds_left}
    yield Check(name=f"{name}: cost", status=Status.OK, text=text, data=data)
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


def _lack(
    config: PretrainedConfig, plan: CheckPlan, device: torch.device, deadline: Deadline
) -> str:
    left = deadline.seconds_left
    if left < plan.min_seconds:
        return f"{max(left, 0):.0f} s of the time budget are left; give more with --seconds"
    num_tokens = max(plan.num_cached) + max(*plan.verify_rows, *plan.draft_rows)
    needed = count_weight_bytes(config, plan.dtype) + plan.spare_bytes
    needed += 2 * num_tokens * count_kv_bytes(config, plan.dtype)  # A growing cache is copied.
    is_gpu = device.type == "cuda"
    free = torch.cuda.mem_get_info(device)[0] if is_gpu else available_memory()
    if free < needed:
        return f"it needs {gigabytes(needed)} and {gigabytes(free)} are free"
    return ""


def _check_target(
    name: str, config: PretrainedConfig, plan: CheckPlan, device: torch.device, deadline: Deadline
) -> Iterator[Check]:
    model = build_random(config, dtype=plan.dtype, device=device)
    target = Target(model, vocab_size=config.vocab_size)
    synchronise(device)
    yield _check_identity(f"{name}: greedy identity", target, plan, deadline)
    for num_cached in plan.num_cached:
        curve = verify_curve(target, plan.verify_rows, num_cached=num_cached, deadline=deadline)
        yield _curve_check(f"{name}: T_verify", curve)
    target.fix_rows(plan.block_size)
    yield _check_identity(f"{name}: greedy identity, fixed rows", target, plan, deadline)


def _check_identity(name: str, target: Target, plan: CheckPlan, deadline: Deadline) -> Check:
    decoding = compare_decoding(
        target,
        num_prompt=plan.num_prompt,
        num_tokens=plan.num_tokens,
        block_size=plan.block_size,
        deadline=deadline,
    )
    return Check(
        name=name,
        status=decoding.status,
        text=str(decoding),
        data={**asdict(decoding), "num_wrong": decoding.num_wrong},
    )


def _check_first_drafter(
    name: str, config: PretrainedConfig, plan: CheckPlan, device: torch.device, deadline: Deadline
) -> Iterator[Check]:
    drafter = build_drafter(config, plan, device)
    packing = compare_packing(drafter, num_cached=min(plan.num_cached))
    yield Check(
        name=f"{name}: packed = alone",
        status=packing.status,
        text=str(packing),
        data=asdict(packing),
    )
    yield from _draft_curves(name, drafter, plan, deadline)


def _check_drafter(
    name: str, config: PretrainedConfig, plan: CheckPlan, device: torch.device, deadline: Deadline
) -> Iterator[Check]:
    yield from _draft_curves(name, build_drafter(config, plan, device), plan, deadline)


def _draft_curves(
    name: str, drafter: DrafterModel, plan: CheckPlan, deadline: Deadline
) -> Iterator[Check]:
    for num_cached in plan.num_cached:
        curve = draft_curve(drafter, plan.draft_rows, num_cached=num_cached, deadline=deadline)
        yield _curve_check(f"{name}: T_draft", curve)


def _curve_check(name: str, curve: Curve) -> Check:
    status = Status.WARN if curve.skipped else Status.OK
    data: dict[str, Any] = asdict(curve)
    return Check(name=name, status=status, text=str(curve), data=data)


def build_drafter(config: PretrainedConfig, plan: CheckPlan, device: torch.device) -> DrafterModel:
    """An untrained drafter of this shape with random weights."""
    model = build_random(config, dtype=plan.dtype, device=device)
    embedding = model.model.embed_tokens.weight[plan.mask_token_id]
    network = DrafterNetwork(model, mask_token_id=plan.mask_token_id, mask_embedding=embedding)
    section = DrafterSection(
        block_size=plan.block_size,
        mask_token_id=plan.mask_token_id,
        label_shift=True,
        source_layers=tuple(range(config.num_hidden_layers)),
        is_trained=False,
    )
    return DrafterModel(network, section, vocab_size=config.vocab_size)
