"""Prompt files to token ids: read, put into the task's template, render, sort into batches."""

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from d3d_ray.training.files import find_files, read_records

if TYPE_CHECKING:  # It takes seconds, and bad files are refused before.
    from transformers import PreTrainedTokenizerBase

_BATCHES_TO_SORT = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """One line of a prompt file; ``text`` is what the user says first."""

    id: str
    dataset: str
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Question:
    """A prompt as the target sees it."""

    id: str
    dataset: str
    prompt_ids: tuple[int, ...]
    answer_ids: tuple[int, ...] | None = None
    """An answer that is there already, and is to be scored."""

    @property
    def key(self) -> tuple[str, str]:
        return self.dataset, self.id


def read_tasks(files: Iterable[Path], templates: Mapping[str, str]) -> list[Task]:
    """Read lines ``{"id": …, "dataset": …, "turns": [first, …]}`` and fill the task templates.

    Only the first turn is asked: a later one refers to an answer that is not the target's. The
    dataset of a line without one is the file's name. A line that repeats another is left out.
    Raises ``ValueError`` with file and line for what is malformed, and for two questions with one
    name.
    """
    tasks: dict[tuple[str, str], Task] = {}
    for file in files:
        try:
            # Not splitlines(): JSON may hold other line separators within its strings.
            lines = file.read_text(encoding="utf-8").rstrip("\n").split("\n")
        except (OSError, UnicodeDecodeError) as error:
            raise ValueError(f"the prompts file {file} cannot be read: {error}") from error
        for number, line in enumerate(lines, start=1):
            where = f"{file}:{number}"
            task = _parse(line, where, templates, default_dataset=file.stem)
            known = tasks.setdefault((task.dataset, task.id), task)
            if known != task:
                raise ValueError(
                    f"{where}: another question is called {task.dataset}/{task.id}: rename one"
                )
    return list(tasks.values())


def read_answered(patterns: Iterable[str]) -> list[Question]:
    """Read rows ``{"id", "dataset", "prompt_ids", "answer_ids"}`` of files, folders and globs.

    Raises ``ValueError`` with the place of what is malformed or there twice.
    """
    questions: dict[tuple[str, str], Question] = {}
    for file in find_files(",".join(patterns)):
        for where, data in read_records(file):
            match data:
                case {"id": str() | int() as id_, "prompt_ids": [*prompt], "answer_ids": [*answer]}:
                    question = Question(
                        id=str(id_),
                        dataset=str(data.get("dataset") or file.name.partition(".")[0]),
                        prompt_ids=tuple(prompt),
                        answer_ids=tuple(answer),
                    )
                case _:
                    raise ValueError(f"{where} has no id, prompt_ids and answer_ids")
            if not all(type(id_) is int and id_ >= 0 for id_ in (*prompt, *answer)):
                raise ValueError(f"{where}: prompt_ids and answer_ids must be lists of token ids")
            if not prompt or not answer:
                raise ValueError(f"{where}: a row needs a prompt and an answer")
            if question.key in questions:
                raise ValueError(f"{where}: {'/'.join(question.key)} is there twice: delete one")
            questions[question.key] = question
    return list(questions.values())


def read_templates(file: Path) -> dict[str, str]:
    """Task templates by dataset; ``default`` is for all others, names with ``_`` are comments.

    Raises ``ValueError`` for a template that does not hold ``{turn}`` and nothing else in braces.
    """
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise ValueError(f"the templates file {file} cannot be read: {error}") from error
    if not isinstance(data, dict):
        raise ValueError(f'{file} must be like {{"gsm8k": "{{turn}} Think."}}, not {data!r:.60}')
    templates = {name: text for name, text in data.items() if not name.startswith("_")}
    for name, text in templates.items():
        try:
            is_filled = "\0" in text.format(turn="\0")
        except (AttributeError, LookupError, ValueError):  # Not a text, or an unknown field.
            is_filled = False
        if not is_filled:
            raise ValueError(
                f"{file}: the template of {name!r} must hold {{turn}}, and other braces doubled"
            )
    return templates


def render(
    tasks: Iterable[Task], tokenizer: "PreTrainedTokenizerBase", *, thinking: bool | None = None
) -> Iterator[Question]:
    """Put each task into the chat template, as :func:`d3d_ray.models.chat.render_chat`."""
    from d3d_ray.models.chat import render_chat  # Loads transformers, which takes seconds.

    for task in tasks:
        messages = [{"role": "user", "content": task.text}]
        text = render_chat(tokenizer, messages, thinking=thinking)
        ids = tokenizer.encode(text, add_special_tokens=False)
        yield Question(id=task.id, dataset=task.dataset, prompt_ids=tuple(ids))


def make_batches(questions: Sequence[Question], batch_size: int) -> list[list[Question]]:
    """Batches of prompts of similar lengths, so that little is padded.

    They depend on nothing but the arguments: a run that is continued answers a prompt in the same
    company, so that bf16, too, gives the same tokens.
    """
    batches: list[list[Question]] = []
    for some in _pieces(questions, batch_size * _BATCHES_TO_SORT):
        by_length = sorted(some, key=lambda question: len(question.prompt_ids))
        batches.extend(_pieces(by_length, batch_size))
    return batches


def _pieces(questions: Iterable[Question], size: int) -> Iterator[list[Question]]:
    rest = iter(questions)
    while some := list(islice(rest, size)):
        yield some


def _parse(line: str, where: str, templates: Mapping[str, str], *, default_dataset: str) -> Task:
    try:
        data: Any = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(f"{where} is not a JSON object: {error}") from error
    match data:
        case {"id": str() | int() as id_, "turns": [str() as turn, *_]} if turn.strip():
            dataset = data.get("dataset", default_dataset)
            if isinstance(dataset, str):
                template = templates.get(dataset, templates.get("default", "{turn}"))
                return Task(id=str(id_), dataset=dataset, text=template.format(turn=turn))
    raise ValueError(
        f'{where} must be like {{"id": "a", "dataset": "b", "turns": ["a question"]}}, not '
        f"{line[:80]!r}"
    )
