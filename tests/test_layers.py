"""The layers of the package, read off its import statements, and the sizes of its pieces."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# A module may import lower layers and its own unit. The package's own __init__ is the front door:
# it may name everything, but lazily (see the last test).
LAYERS = {
    "records": 0,
    "metrics": 0,
    "settings": 0,
    "hardware": 0,
    "command_line": 0,
    "config": 1,
    "sampling": 2,
    "acceptance": 2,
    "packing": 2,
    "models": 3,
    "decode": 4,
    "runtime": 5,
    "training": 5,
    "pruning": 5,
    "serving": 6,
    "bench": 6,
    "jobs": 7,
    "__init__": 7,
}
# Besides the standard library. Higher layers are free but for the two tables below.
THIRD_PARTY = {0: frozenset[str](), 1: frozenset({"yaml"}), 2: frozenset({"torch"})}
LOWEST_LAYER = {"torch": 2, "transformers": 3, "ray": 5}
ONLY_IN = {
    "yaml": "config",
    "ray.serve": "serving",
    "ray.train": "training",
    "ray.data": "training",
    "deepspeed": "training",
}
# Imports within one layer, with the reason.
SIDEWAYS: dict[tuple[str, str], str] = {
    ("metrics", "records"): "metrics are computed from the records of rounds",
    ("pruning", "training"): "healing is a training run, and layers are judged as training judges",
}
# Files and functions (path::name) over the limits, with the reason.
OVERSIZE: dict[str, str] = {
    "d3d_ray/config.py": "all settings of the engine on one page, with their meanings",
    "d3d_ray/records.py": "all that crosses a process on one page; a third of it is docstrings",
}
MAX_FILE_LINES, MAX_FUNCTION_LINES, MAX_JOB_LINES = 250, 50, 60


def list_sources(root: Path) -> list[Path]:
    return sorted([*root.glob("d3d_ray/**/*.py"), *root.glob("jobs/**/*.py")])


def list_imports(path: Path, root: Path) -> Iterator[str]:
    """Dotted names of everything imported anywhere in the file, relative imports resolved."""
    package = path.relative_to(root).parent.parts
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else ()
            module = ".".join([*base, *filter(None, [node.module])])
            yield from (f"{module}.{alias.name}" for alias in node.names)


def find_wrong_imports(root: Path) -> list[str]:
    wrong = []
    for path in list_sources(root):
        parts = path.relative_to(root).with_suffix("").parts
        unit = "jobs" if parts[0] == "jobs" else parts[1]
        if unit not in LAYERS:
            wrong.append(f"{path.relative_to(root)}: {unit} has no layer, give it one in LAYERS")
            continue
        for name in list_imports(path, root):
            fault = judge_import(unit, name)
            if fault:
                wrong.append(f"{path.relative_to(root)} imports {name}: {fault}")
    return wrong


def judge_import(unit: str, name: str) -> str:
    """What is wrong with the import of ``name`` in ``unit``; empty when it is allowed."""
    top, layer = name.partition(".")[0], LAYERS[unit]
    if top in ("d3d_ray", "jobs"):
        other = "jobs" if top == "jobs" else f"{name}.__init__".split(".")[1]
        is_lower = LAYERS.get(other, layer) < layer
        if is_lower or other == unit or unit == "jobs" or (unit, other) in SIDEWAYS:
            return ""
        return f"layer {layer} must not import {other} of layer {LAYERS.get(other)}"
    if top in sys.stdlib_module_names:
        return ""
    if layer in THIRD_PARTY and top not in THIRD_PARTY[layer]:
        return f"layer {layer} may import {set(THIRD_PARTY[layer]) or 'the standard library only'}"
    if layer < LOWEST_LAYER.get(top, 0):
        return f"{top} is for layers {LOWEST_LAYER[top]} and up"
    for owned, owner in ONLY_IN.items():
        if f"{name}.".startswith(f"{owned}.") and unit != owner:
            return f"{owned} belongs to {owner} alone"
    return ""


def find_oversize(root: Path) -> dict[str, int]:
    """Lines of the files and functions that are over the limits."""
    sizes = {}
    for path in list_sources(root):
        text, name = path.read_text(encoding="utf-8"), str(path.relative_to(root))
        is_job = name.startswith("jobs/")
        if len(text.splitlines()) > (MAX_JOB_LINES if is_job else MAX_FILE_LINES):
            sizes[name] = len(text.splitlines())
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                assert node.end_lineno is not None
                num_lines = node.end_lineno - node.lineno + 1
                if num_lines > MAX_FUNCTION_LINES:
                    sizes[f"{name}::{node.name}"] = num_lines
    return sizes


def test_no_module_imports_upward() -> None:
    assert len(list_sources(ROOT)) > 5
    assert find_wrong_imports(ROOT) == []


def test_files_and_functions_are_within_their_limits() -> None:
    oversize = find_oversize(ROOT)
    assert {name: size for name, size in oversize.items() if name not in OVERSIZE} == {}
    assert set(OVERSIZE) - set(oversize) == set(), "these fit now: take them off the list"


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("d3d_ray/records.py", "from d3d_ray.config import EngineConfig"),
        ("d3d_ray/records.py", "import torch.nn"),
        ("d3d_ray/config.py", "def late():\n    from torch import nn"),
        ("d3d_ray/settings.py", "import yaml"),
        ("d3d_ray/packing.py", "import numpy"),
        ("d3d_ray/sampling.py", "import transformers"),
        ("d3d_ray/sampling.py", "from d3d_ray.acceptance import count_accepted"),
        ("d3d_ray/models/target.py", "from .. import decode"),
        ("d3d_ray/models/target.py", "import yaml"),
        ("d3d_ray/decode/session.py", "import ray"),
        ("d3d_ray/decode/session.py", "from d3d_ray import runtime"),
        ("d3d_ray/decode/session.py", "from d3d_ray import Engine"),
        ("d3d_ray/decode/session.py", "import d3d_ray"),
        ("d3d_ray/runtime/engine.py", "from ray import serve"),
        ("d3d_ray/runtime/engine.py", "import deepspeed.comm"),
        ("d3d_ray/runtime/engine.py", "from ..training import loop"),
        ("d3d_ray/serving/app.py", "from jobs import generate"),
        ("d3d_ray/bench/run.py", "from d3d_ray.serving.app import build"),
        ("d3d_ray/helpers.py", "import json"),
        ("jobs/serve.py", "import ray.serve"),
    ],
)
def test_a_forbidden_import_is_caught(tmp_path: Path, file: str, source: str) -> None:
    write(tmp_path / file, source)
    (fault,) = find_wrong_imports(tmp_path)
    assert fault.startswith(file)


@pytest.mark.parametrize(
    ("file", "source"),
    [
        ("d3d_ray/metrics.py", "import math\nfrom d3d_ray.records import Round"),
        ("d3d_ray/config.py", "import yaml\nfrom d3d_ray.settings import check"),
        ("d3d_ray/decode/session.py", "from . import protocols\nfrom ..packing import pack"),
        ("d3d_ray/decode/__init__.py", "from .session import Session"),
        ("d3d_ray/serving/app.py", "from ray import serve\nfrom d3d_ray.runtime import engine"),
        ("jobs/generate.py", "import d3d_ray\nfrom d3d_ray import Engine\nimport d3d_ray.bench"),
    ],
)
def test_an_allowed_import_passes(tmp_path: Path, file: str, source: str) -> None:
    write(tmp_path / file, source)
    assert find_wrong_imports(tmp_path) == []


def test_what_is_too_long_is_caught(tmp_path: Path) -> None:
    write(tmp_path / "d3d_ray/full.py", "x = 1\n" * 250)
    write(tmp_path / "d3d_ray/long.py", "x = 1\n" * 251)
    write(tmp_path / "jobs/long.py", "x = 1\n" * 61)
    write(tmp_path / "d3d_ray/f.py", "def fits():\n" + "    x = 1\n" * 49)
    write(tmp_path / "d3d_ray/g.py", "class A:\n    async def g():\n" + "        x = 1\n" * 50)
    found = find_oversize(tmp_path)
    assert found == {"d3d_ray/long.py": 251, "jobs/long.py": 61, "d3d_ray/g.py::g": 51}


def test_records_and_config_load_nothing_heavy() -> None:
    code = (
        "import sys, d3d_ray.config, d3d_ray.metrics\n"
        "print(sorted({'torch', 'ray', 'transformers'} & set(sys.modules)))"
    )
    run = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"


def write(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
