import pickle
from dataclasses import FrozenInstanceError, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml

from d3d_ray.config import (
    DecodeConfig,
    DrafterConfig,
    EngineConfig,
    RuntimeConfig,
    TargetConfig,
    config_table,
    from_dict,
    list_presets,
    load_config,
    to_dict,
    to_yaml,
)
from d3d_ray.hardware import has_fast_bfloat16
from d3d_ray.records import Mode
from d3d_ray.settings import list_settings, make_table

README = Path(__file__).parents[1] / "README.md"
PLAIN = EngineConfig(target=TargetConfig(source="folder"))
UNUSUAL = EngineConfig(
    name="größer: 1",
    target=TargetConfig(source="no", dtype="float32", max_context=2048, enable_thinking=False),
    drafter=DrafterConfig(source="1", num_layers=3, block_size=4, label_shift=False),
    decode=DecodeConfig(mode="sync", draft_noise="none", max_wait_ms=0.5, simulate_acceptance=1),
    runtime=RuntimeConfig(transport="call", share_device=True, kv_budget_tokens=4096),
)


def write(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return str(path)


@pytest.mark.parametrize("config", [PLAIN, UNUSUAL])
def test_a_config_survives_its_file_its_dictionary_and_a_pickle(
    config: EngineConfig, tmp_path: Path
) -> None:
    assert load_config(write(tmp_path / "config.yaml", to_yaml(config))) == config
    assert from_dict(to_dict(config)) == config
    assert pickle.loads(pickle.dumps(config)) == config


def test_equal_configs_give_equal_text() -> None:
    config = load_config("smollm2-cpu", ["decode.max_wait_ms=7"])
    again = load_config("smollm2-cpu", ["decode.max_wait_ms=7.0"])
    assert to_yaml(config) == to_yaml(again)
    assert to_yaml(config).startswith("name: smollm2-cpu\ntarget:\n  source: embedded:")


def test_a_mode_of_the_records_can_be_configured_and_written() -> None:
    assert set(get_args(get_type_hints(DecodeConfig)["mode"])) == {str(mode) for mode in Mode}
    config = replace(PLAIN, decode=DecodeConfig(mode=Mode.AR))  # type: ignore[arg-type]
    assert yaml.safe_load(to_yaml(config))["decode"]["mode"] == "ar"


def test_a_config_cannot_be_changed() -> None:
    with pytest.raises(FrozenInstanceError):
        PLAIN.name = "other"  # type: ignore[misc]


def test_the_presets_are_listed_by_name() -> None:
    assert list_presets() == ["qwen3-32b", "qwen3-8b", "smollm2-cpu"]


@pytest.mark.parametrize("name", list_presets())
def test_a_preset_loads_and_is_named_like_its_file(name: str) -> None:
    config = load_config(name)
    assert config.name == name
    if config.drafter.source is None:  # Otherwise the folder says it.
        block_size = config.drafter.block_size
        assert block_size is not None
        # A pass holds the block under verification and at least one mask-first branch.
        assert config.decode.max_draft_rows >= 2 * block_size - 1


def test_what_a_file_leaves_out_has_its_default(tmp_path: Path) -> None:
    text = "target:\n  source: folder\ndecode:\n#  mode: ar\n"
    assert load_config(write(tmp_path / "config.yaml", text)) == PLAIN


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("decode.mode=sync", "sync"),
        ("name=other", "other"),
        ("name='12'", "12"),
        ("target.source=org/model:tag=2", "org/model:tag=2"),
        ("target.max_context=4096", 4096),
        ("drafter.block_size=null", None),
        ("drafter.block_size=", None),
        ("drafter.label_shift=false", False),
        ("drafter.dtype=float16", "float16"),
        ("decode.simulate_acceptance=0.8", 0.8),
        ("decode.simulate_acceptance=1", 1.0),
        ("decode.max_wait_ms=1e3", 1000.0),
        ("runtime.share_device=true", True),
    ],
)
def test_an_override_has_the_type_of_its_field(override: str, expected: Any) -> None:
    value: Any = to_dict(load_config("smollm2-cpu", [override]))
    for key in override.partition("=")[0].split("."):
        value = value[key]
    assert value == expected
    assert type(value) is type(expected)


def test_the_last_override_wins_and_the_rest_of_the_preset_stays() -> None:
    config = load_config("smollm2-cpu", ["drafter.num_layers=4", "drafter.num_layers=2"])
    preset = load_config("smollm2-cpu")
    assert config == replace(preset, drafter=replace(preset.drafter, num_layers=2))


def test_an_override_can_give_what_the_file_lacks(tmp_path: Path) -> None:
    path = write(tmp_path / "config.yaml", "name: custom\n")
    assert load_config(path, ["target.source=folder"]) == PLAIN
    with pytest.raises(ValueError, match=r"target\.source is missing"):
        load_config(path)


@pytest.mark.parametrize(
    ("override", "path", "nearest"),
    [
        ("decode.mod=ar", "decode.mod", "decode.mode"),
        ("mode=ar", "mode", "decode.mode"),
        ("decode.dtype=float32", "decode.dtype", None),
        ("tagret.source=x", "tagret.source", "target.source"),
        ("draft.block_size=4", "draft.block_size", "drafter.block_size"),
        ("runtime.max_request=1", "runtime.max_request", "runtime.max_requests"),
        ("decode.mode.x=1", "decode.mode.x", "decode.mode"),
        ("decode=null", "decode", None),
    ],
)
def test_an_unknown_override_names_its_path_and_the_nearest_setting(
    override: str, path: str, nearest: str | None
) -> None:
    with pytest.raises(ValueError, match="unknown setting") as caught:
        load_config("smollm2-cpu", [override])
    known = [setting.path for setting in list_settings(EngineConfig)]
    suggested = str(caught.value).rpartition(" is ")[2].strip("'")
    assert f"'{path}'" in str(caught.value)
    assert suggested == nearest if nearest else suggested in known


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("target: {sauce: x}", r"unknown setting 'target.sauce': .* is 'target.source'"),
        ("tagret: {source: x}", r"unknown setting 'tagret': .* is 'target'"),
        ("1: x", r"unknown setting '1'"),
        ("target: folder", r"target must hold settings, not 'folder'"),
        ("- target", r"must hold settings"),
        ("", r"must hold settings"),
        ("target: [", r"config\.yaml is not valid YAML"),
    ],
)
def test_a_faulty_file_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config(write(tmp_path / "config.yaml", text))


def test_an_unknown_preset_names_the_nearest_one() -> None:
    with pytest.raises(ValueError, match=r"'smolm2-cpu' is neither .* preset is 'smollm2-cpu'"):
        load_config("smolm2-cpu")
    with pytest.raises(ValueError, match="is neither a preset nor a file"):
        load_config("no/such/file.yaml")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("decode.max_draft_rows=true", r"decode\.max_draft_rows must be a whole number, not True"),
        ("decode.max_draft_rows=1.5", r"decode\.max_draft_rows must be a whole number, not 1\.5"),
        ("decode.max_draft_rows=null", r"decode\.max_draft_rows must be a whole number, not None"),
        ("decode.max_draft_rows=1", r"decode\.max_draft_rows must be at least 2, not 1"),
        ("decode.mode=turbo", r"decode\.mode must be ar, sync, async or dflash, not 'turbo'"),
        ("decode.mode=off", r"decode\.mode must be ar, sync, async or dflash, not False"),
        ("decode.max_wait_ms=true", r"decode\.max_wait_ms must be a number, not True"),
        ("decode.max_wait_ms=.nan", r"decode\.max_wait_ms must be a number, not nan"),
        ("decode.max_wait_ms=soon", r"decode\.max_wait_ms must be a number, not 'soon'"),
        ("decode.max_wait_ms=-1", r"decode\.max_wait_ms must be at least 0, not -1\.0"),
        ("decode.simulate_acceptance=1.1", r"decode\.simulate_acceptance must be at most 1"),
        ("drafter.label_shift=1", r"drafter\.label_shift must be true or false or null, not 1"),
        ("drafter.num_layers=0", r"drafter\.num_layers must be at least 1, not 0"),
        ("drafter.block_size=1", r"drafter\.block_size must be at least 2, not 1"),
        ("drafter.mask_token_id=-1", r"drafter\.mask_token_id must be at least 0, not -1"),
        ("runtime.verifier_gpus=0", r"runtime\.verifier_gpus must be at least 1, not 0"),
        ("runtime.call_timeout_s=0", r"runtime\.call_timeout_s must be above 0, not 0\.0"),
        ("runtime.share_device=1", r"runtime\.share_device must be true or false, not 1"),
        (
            "target.dtype=int8",
            r"target\.dtype must be bfloat16, float32, float16 or auto, not 'int8'",
        ),
        ("target.source=''", r"target\.source is empty"),
        ("name=3", r"name must be text, not 3 \(put it in quotes\)"),
        ("decode.mode", r"override 'decode\.mode' has no value: write decode\.mode=VALUE"),
        ("decode.mode=[", r"override 'decode\.mode=\[' is not valid YAML"),
        ("decode.mode={a: 1}", r"decode\.mode must be ar, sync, async or dflash, not {'a': 1}"),
    ],
)
def test_a_wrong_value_is_refused_with_its_path_and_remedy(override: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        load_config("smollm2-cpu", [override])


@pytest.mark.parametrize(
    ("cpuinfo", "device", "dtype"),
    [
        ("flags\t\t: fpu avx2", None, "float32"),
        ("flags\t\t: fpu avx512_bf16", None, "bfloat16"),
        ("Features\t: fp asimd bf16", None, "bfloat16"),
        ("model name\t: amx_bf16\nflags\t\t: fpu", None, "float32"),
        ("flags\t\t: fpu avx2", "nvidiactl", "bfloat16"),
    ],
)
def test_the_automatic_dtype_is_what_the_machine_is_fast_with(
    cpuinfo: str, device: str | None, dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc" / "cpuinfo").write_text(cpuinfo, encoding="utf-8")
    if device is not None:
        (tmp_path / "dev").mkdir()
        (tmp_path / "dev" / device).touch()
    monkeypatch.setattr("d3d_ray.config.has_fast_bfloat16", partial(has_fast_bfloat16, tmp_path))
    assert TargetConfig(source="any", dtype="auto").dtype == dtype
    assert load_config("smollm2-cpu").target.dtype == dtype


def test_a_wrong_value_is_refused_in_python_too() -> None:
    with pytest.raises(ValueError, match=r"decode\.prefill_chunk must be at least 1, not 0"):
        DecodeConfig(prefill_chunk=0)
    with pytest.raises(ValueError, match=r"decode must be DecodeConfig, not None"):
        replace(PLAIN, decode=None)  # type: ignore[arg-type]


def test_every_setting_is_described() -> None:
    settings = list(list_settings(EngineConfig))
    assert [setting.path for setting in settings[:3]] == ["name", "target.source", "target.dtype"]
    assert [setting.path for setting in settings if not setting.meaning.endswith(".")] == []


@dataclass(frozen=True, kw_only=True)
class Small:
    size: int | None = None
    """First,
    second."""
    color: str
    """Third."""


@dataclass(frozen=True, kw_only=True)
class Silent:
    size: int = 1


def test_the_table_shows_path_type_default_and_meaning() -> None:
    assert make_table(Small).splitlines()[2:] == [
        "| `size` | a whole number or null | `null` | First, second. |",
        "| `color` | text | required | Third. |",
    ]


def test_a_setting_without_a_description_is_refused() -> None:
    with pytest.raises(KeyError, match="size"):
        make_table(Silent)


def test_the_readme_has_the_table_of_the_dataclasses() -> None:
    _, begin, rest = README.read_text(encoding="utf-8").partition("<!-- config:begin -->\n")
    table, end, _ = rest.partition("<!-- config:end -->")
    assert begin and end
    remedy = "put the output of d3d_ray.config.config_table() between the README's markers"
    assert table == config_table(), remedy
