"""What frozen settings dataclasses share: building, checking, listing, describing. No defaults."""

import ast
import dataclasses
import difflib
import inspect
import json
import math
import operator
import types
import typing
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal, TypeVar

T = TypeVar("T")
_NO_BOUNDS: Mapping[str, float] = types.MappingProxyType({})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """One field of a (nested) settings dataclass."""

    path: str
    """Dotted, such as ``decode.mode``."""
    hint: Any
    default: Any
    """``dataclasses.MISSING`` where a value must be given."""
    meaning: str
    """The attribute's docstring, on one line."""


def list_settings(owner: type, prefix: str = "") -> Iterator[Setting]:
    """All fields in order, those of nested dataclasses in place."""
    hints, meanings = typing.get_type_hints(owner), _attribute_docstrings(owner)
    for item in dataclasses.fields(owner):
        path, hint = f"{prefix}{item.name}", hints[item.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            yield from list_settings(hint, f"{path}.")
        else:
            meaning = meanings[item.name]
            yield Setting(path=path, hint=hint, default=item.default, meaning=meaning)


def make_table(owner: type) -> str:
    """All fields as a Markdown table: path, type, default, meaning."""
    rows = ["| setting | type | default | meaning |", "|---|---|---|---|"]
    for setting in list_settings(owner):
        is_required = setting.default is dataclasses.MISSING
        default = "required" if is_required else f"`{json.dumps(setting.default)}`"
        cells = (f"`{setting.path}`", describe_type(setting.hint), default, setting.meaning)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows) + "\n"


def describe_type(hint: Any) -> str:
    """In words: ``a whole number or null``, ``ar, sync or async``."""
    *names, last = _type_names(hint)
    return f"{', '.join(names)} or {last}" if names else last


def _type_names(hint: Any) -> list[str]:
    if typing.get_origin(hint) is Literal:
        return list(typing.get_args(hint))
    if typing.get_args(hint):
        return [name for each in typing.get_args(hint) for name in _type_names(each)]
    words = {int: "a whole number", float: "a number", bool: "true or false", str: "text"}
    return ["null" if hint is types.NoneType else words.get(hint) or hint.__name__]


def check(
    settings: Any,
    section: str,
    *,
    at_least: Mapping[str, float] = _NO_BOUNDS,
    above: Mapping[str, float] = _NO_BOUNDS,
    at_most: Mapping[str, float] = _NO_BOUNDS,
) -> None:
    """Raise ``ValueError`` when a field has not the declared type or is out of its bounds."""
    bounds = (
        (at_least, operator.ge, "at least"),
        (above, operator.gt, "above"),
        (at_most, operator.le, "at most"),
    )
    for name, hint in typing.get_type_hints(type(settings)).items():
        path, value = f"{section}{name}", getattr(settings, name)
        if not _fits(value, hint):
            remedy = " (put it in quotes)" if hint is str else ""
            raise ValueError(f"{path} must be {describe_type(hint)}, not {value!r}{remedy}")
        if value == "":
            raise ValueError(f"{path} is empty: give it a value or leave it out")
        for limits, is_within, words in bounds:
            if value is not None and name in limits and not is_within(value, limits[name]):
                raise ValueError(f"{path} must be {words} {limits[name]}, not {value!r}")


def build(owner: type[T], data: Any, prefix: str = "") -> T:
    """Make ``owner`` from nested mappings; an unknown or missing field is a ``ValueError``."""
    if data is None:  # A section may have all its lines commented out.
        data = {}
    if not isinstance(data, Mapping):
        raise ValueError(f"{prefix.rstrip('.')} must hold settings, not {data!r}")
    hints = typing.get_type_hints(owner)
    for key in data:
        if key not in hints:
            raise ValueError(unknown_setting(owner, f"{prefix}{key}", prefix))
    values = {}
    for item in dataclasses.fields(owner):  # type: ignore[arg-type]
        path, hint = f"{prefix}{item.name}", hints[item.name]
        if dataclasses.is_dataclass(hint):
            assert isinstance(hint, type)
            values[item.name] = build(hint, data.get(item.name), f"{path}.")
        elif item.name in data:
            values[item.name] = _to_float(data[item.name], hint)
        elif item.default is dataclasses.MISSING:
            raise ValueError(f"{path} is missing: set it in the file or with {path}=VALUE")
    return owner(**values)


def unknown_setting(owner: type, path: str, prefix: str = "") -> str:
    """The message for a field that does not exist; it names the nearest one that does."""
    known = {setting.path for setting in list_settings(owner, prefix)}
    known |= {other.rpartition(".")[0] for other in known}
    known -= {path, ""}

    def likeness(other: str) -> tuple[float, str]:
        pairs = (path, other), (path.rpartition(".")[2], other.rpartition(".")[2])
        return sum(difflib.SequenceMatcher(None, *pair).ratio() for pair in pairs), other

    return f"unknown setting {path!r}: the nearest known one is {max(known, key=likeness)!r}"


def _to_float(value: Any, hint: Any) -> Any:
    is_float = hint is float or float in typing.get_args(hint)
    if not is_float or type(value) not in (int, str):
        return value
    try:
        return float(value)  # YAML takes 1 for a whole number and 1e3 for text.
    except ValueError:
        return value


def _fits(value: Any, hint: Any) -> bool:
    if typing.get_origin(hint) is Literal:
        return value in typing.get_args(hint)
    if typing.get_args(hint):
        return any(_fits(value, alternative) for alternative in typing.get_args(hint))
    if hint is float:
        return type(value) in (int, float) and math.isfinite(value)
    return type(value) is hint  # Not isinstance: a bool is no whole number.


def _attribute_docstrings(owner: type) -> dict[str, str]:
    (definition,) = ast.parse(inspect.getsource(owner)).body
    assert isinstance(definition, ast.ClassDef)
    texts = {}
    for pair in pairwise(definition.body):
        match pair:
            case (
                ast.AnnAssign(target=ast.Name(id=name)),
                ast.Expr(value=ast.Constant(value=str(text))),
            ):
                texts[name] = " ".join(text.split())
    return texts
