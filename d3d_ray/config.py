"""All settings of the engine: frozen dataclasses, presets, YAML files and dotted overrides.

The dataclasses are the one source of names, types, defaults and descriptions; the table in the
README is made by :func:`config_table`.
"""

import dataclasses
import difflib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import Any, Literal, TypeVar

import yaml

from d3d_ray.hardware import has_fast_bfloat16
from d3d_ray.settings import build, check, list_settings, make_table, unknown_setting

T = TypeVar("T")
Dtype = Literal["bfloat16", "float32", "float16"]


@dataclass(frozen=True, slots=True, kw_only=True)
class TargetConfig:
    source: str
    """Folder or hub name of the model whose output must not change, or `embedded:<name>`."""
    dtype: Literal[Dtype, "auto"] = "bfloat16"
    """Of weights and KV cache; auto = bfloat16 where it is fast, else float32."""
    fixed_rows: bool = True
    """Pad every block to the block size, so that a token is the same bits in every mode."""
    max_context: int | None = None
    """Longest prompt plus answer, in tokens; null = the model's own limit."""
    enable_thinking: bool | None = None
    """Told to the chat template of models that can think aloud; null = its own default."""

    def __post_init__(self) -> None:
        check(self, "target.", at_least={"max_context": 2})
        if self.dtype == "auto":
            dtype = "bfloat16" if has_fast_bfloat16() else "float32"
            object.__setattr__(self, "dtype", dtype)


@dataclass(frozen=True, slots=True, kw_only=True)
class DrafterConfig:
    source: str | None = None
    """Folder, hub name or `embedded:<name>`; null = made from the target's weights, untrained."""
    num_layers: int | None = None
    """Layers of a drafter made from other weights, picked evenly; null = all of them."""
    block_size: int | None = None
    """Tokens of one block, the anchor and the drafts; null = what the drafter's folder says."""
    mask_token_id: int | None = None
    """The reserved id that stands for a draft to be made; null = what the drafter's folder says."""
    label_shift: bool | None = None
    """A row at position p predicts p + 1 rather than p; null = what the drafter's folder says."""
    dtype: Dtype | None = None
    """Of weights and KV cache; null = the target's."""

    def __post_init__(self) -> None:
        check(self, "drafter.", at_least={"num_layers": 1, "block_size": 2, "mask_token_id": 0})


@dataclass(frozen=True, slots=True, kw_only=True)
class DFlashConfig:
    source: str | None = None
    """Folder or hub name of a DFlash drafter, for mode `dflash`; null = there is none."""
    dtype: Dtype | None = None
    """Of its weights and KV cache; null = the target's."""

    def __post_init__(self) -> None:
        check(self, "dflash.")


@dataclass(frozen=True, slots=True, kw_only=True)
class DecodeConfig:
    mode: Literal["ar", "sync", "async", "dflash"] = "async"
    """Plain; drafting and verifying in turn, or both at once; the DFlash drafter, in turn."""
    draft_plan: Literal["packed", "glue-first", "anytime"] = "packed"
    """One packed pass for all outcomes; a pass that foretells them first; or pass after pass."""
    max_passes: int = 8
    """Most passes for one block, of plan `anytime`."""
    miss_policy: Literal["soft", "jit", "auto"] = "soft"
    """No branch for the target's token: take one for the same k, draft anew, or what pays."""
    never_slower: bool = True
    """Draft less, or not at all, for a request that measures faster without."""
    max_draft_rows: int = 64
    """Token budget of one packed pass: its rows, those of the block under verification included."""
    draft_noise: Literal["shared", "none"] = "shared"
    """At temperature > 0: draft with the noise that the target draws with, or greedily."""
    prefill_chunk: int = 512
    """Prompt tokens that are run at a time, between the rounds of other requests."""
    max_wait_ms: float = 1000.0
    """Hard upper bound of any wait for drafts, in milliseconds."""
    simulate_acceptance: float | None = None
    """SIMULATED drafts, each right with this chance; null = real ones."""

    def __post_init__(self) -> None:
        check(
            self,
            "decode.",
            at_least={
                "max_draft_rows": 2,
                "max_passes": 1,
                "prefill_chunk": 1,
                "max_wait_ms": 0,
                "simulate_acceptance": 0,
            },
            at_most={"simulate_acceptance": 1},
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class RuntimeConfig:
    transport: Literal["auto", "channel", "call"] = "auto"
    """Between the actors: shared-memory channel, actor calls, or the channel where it works."""
    share_device: bool = False
    """Let verifier and drafter use the same GPU; otherwise that is refused."""
    verifier_gpus: int = 1
    """GPUs over which the target's layers are spread; the drafter takes one more."""
    verifier_cpus: int = 1
    """Cores and torch threads of the target where there is no GPU."""
    drafter_cpus: int = 1
    """Cores and torch threads of the drafter where there is no GPU."""
    kv_budget_tokens: int | None = None
    """Tokens that the target's KV caches may hold together; null = from the free memory."""
    max_requests: int = 64
    """Requests in flight; further ones wait."""
    max_waiting: int = 1024
    """Requests that wait; further ones are refused."""
    load_timeout_s: float = 600.0
    """Longest loading of a model, in seconds."""
    call_timeout_s: float = 30.0
    """Longest wait for the answer of an actor, in seconds."""
    heartbeat_s: float = 20.0
    """An actor that is silent for longer is replaced, in seconds."""
    max_pass_s: float = 120.0
    """Longest pass of a model; an actor that works on one for longer is replaced, in seconds."""

    def __post_init__(self) -> None:
        counts = ("verifier_gpus", "verifier_cpus", "drafter_cpus", "max_requests")
        check(
            self,
            "runtime.",
            at_least={**dict.fromkeys(counts, 1), "kv_budget_tokens": 1, "max_waiting": 0},
            above=dict.fromkeys(
                ("load_timeout_s", "call_timeout_s", "heartbeat_s", "max_pass_s"), 0
            ),
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """Everything the engine needs. Raises ``ValueError`` on a value of wrong type or range."""

    name: str = "custom"
    """Shown in reports and as the name of the served model."""
    target: TargetConfig
    drafter: DrafterConfig = field(default_factory=DrafterConfig)
    dflash: DFlashConfig = field(default_factory=DFlashConfig)
    decode: DecodeConfig = field(default_factory=DecodeConfig)
    runtime: RuntimeConfig = field(default_factory=RuntimeConfig)

    def __post_init__(self) -> None:
        check(self, "")
        if self.decode.mode == "dflash" and self.dflash.source is None:
            raise ValueError("decode.mode=dflash needs a DFlash drafter: set dflash.source")
        if self.dflash.source is not None and self.decode.simulate_acceptance is not None:
            raise ValueError(
                "drafts of a DFlash drafter are never simulated: leave out dflash.source or "
                "decode.simulate_acceptance"
            )
        if self.dflash.source is not None and self.runtime.verifier_gpus > 1:
            raise ValueError("dflash.source needs the target on one device: verifier_gpus=1")

    @property
    def has_drafter_actor(self) -> bool:
        """Whether the stand-alone drafter runs; a DFlash drafter lives with the target."""
        return self.decode.mode in ("sync", "async")


def list_presets(presets: Traversable | None = None) -> list[str]:
    """Names that :func:`load_config` knows."""
    files = (presets or _presets()).iterdir()
    return sorted(file.name.removesuffix(".yaml") for file in files if file.name.endswith(".yaml"))


def load_config(preset_or_path: str, overrides: Sequence[str] = ()) -> EngineConfig:
    """Read a preset or a YAML file, then apply overrides such as ``decode.mode=sync``.

    Values of overrides are YAML scalars. Raises ``ValueError`` on an unknown preset or setting
    (with the nearest known one), a missing setting, and a value of wrong type or range.
    """
    return read_settings(EngineConfig, preset_or_path, overrides, presets=_presets())


def read_settings(
    owner: type[T], name_or_path: str, overrides: Sequence[str], *, presets: Traversable
) -> T:
    """As :func:`load_config`, for any settings dataclass and folder of ready-made YAML files."""
    data = _parse_yaml(_read(name_or_path, presets), name_or_path)
    if not isinstance(data, dict):
        raise ValueError(f"{name_or_path} must hold settings such as 'target:', not {data!r}")
    for override in overrides:
        _apply_override(owner, data, override)
    return build(owner, data)


def from_dict(data: Mapping[str, Any]) -> EngineConfig:
    """The inverse of :func:`to_dict`; settings that are left out have their defaults."""
    return build(EngineConfig, data)


def to_dict(config: Any) -> dict[str, Any]:
    """Nested plain values, in the order of the dataclasses' fields."""
    return dataclasses.asdict(config, dict_factory=_plain)


def to_yaml(config: Any) -> str:
    """A file for :func:`load_config` with every setting; equal configs give equal text."""
    return yaml.safe_dump(to_dict(config), sort_keys=False, allow_unicode=True)


def config_table() -> str:
    """The Markdown table of all settings; the README has it."""
    return make_table(EngineConfig)


# --- reading -------------------------------------------------------------------------------------


def _presets() -> Traversable:
    return resources.files("d3d_ray") / "presets"


def _read(preset_or_path: str, folder: Traversable) -> str:
    presets = list_presets(folder)
    if preset_or_path in presets:
        return (folder / f"{preset_or_path}.yaml").read_text(encoding="utf-8")
    if Path(preset_or_path).is_file():
        return Path(preset_or_path).read_text(encoding="utf-8")
    nearest = difflib.get_close_matches(preset_or_path, presets, n=1, cutoff=0.0)
    raise ValueError(
        f"{preset_or_path!r} is neither a preset nor a file: the nearest preset is {nearest[0]!r}, "
        f"all of them are {', '.join(presets)}"
    )


def _parse_yaml(text: str, where: str) -> Any:
    try:
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"{where} is not valid YAML: {error}") from error


def _apply_override(owner: type, data: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    if not equals:
        raise ValueError(f"override {override!r} has no value: write {override}=VALUE")
    if path not in [setting.path for setting in list_settings(owner)]:
        raise ValueError(unknown_setting(owner, path))
    section, _, name = path.rpartition(".")
    if section and data.get(section) is None:
        data[section] = {}
    settings = data[section] if section else data
    if isinstance(settings, dict):  # Otherwise the file is at fault, and build() says so.
        settings[name] = _parse_yaml(text, f"override {override!r}")


def _plain(items: list[tuple[str, Any]]) -> dict[str, Any]:
    # A member of a StrEnum is a valid mode, but YAML does not know it.
    return {key: str(value) if isinstance(value, str) else value for key, value in items}
