"""Where the questions come from: a JSONL file, or one text."""

import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedPrompt:
    """One question to the model."""

    id: str
    text: str
    """What the user says first."""

    @property
    def messages(self) -> list[dict[str, str]]:
        """For the model's chat template."""
        return [{"role": "user", "content": self.text}]


def read_prompts(file: Path) -> list[NamedPrompt]:
    """Read lines ``{"id": …, "turns": [first, …]}``; only the first turn is asked.

    Raises ``ValueError`` with file and line for what is empty or malformed.
    """
    try:
        # Not splitlines(): JSON may hold other line separators than the line feed as they are.
        lines = file.read_text(encoding="utf-8-sig").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise ValueError(f"the prompts file {file} cannot be read: {error}") from error
    if lines == [""]:
        raise ValueError(f'{file} is empty: write lines such as {{"id": "a", "turns": ["Hi"]}}')
    return [_parse(line, f"{file}:{number}") for number, line in enumerate(lines, start=1)]


def make_prompt(text: str) -> NamedPrompt:
    """A question given as text. Raises ``ValueError`` when there is nothing in it."""
    if not text.strip():
        raise ValueError("the prompt is empty: ask something")
    return NamedPrompt(id="prompt", text=text)


def _parse(line: str, where: str) -> NamedPrompt:
    try:
        data = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not a JSON object: {error}") from error
    match data:
        case {"id": str() | int() as id_, "turns": [str() as first, *_]} if first.strip():
            return NamedPrompt(id=str(id_), text=first)
    raise ValueError(
        f'{where} must be like {{"id": "a", "turns": ["a question"]}}, not {line[:80]!r}'
    )
