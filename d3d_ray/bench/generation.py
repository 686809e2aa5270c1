"""What ``jobs/generate.py`` does with an engine: answer or compare, print, write files."""

import asyncio
import json
import sys
from pathlib import Path

from tqdm import tqdm

from d3d_ray.bench.compare import compare, make_comparison
from d3d_ray.bench.options import Options
from d3d_ray.bench.prompts import NamedPrompt
from d3d_ray.bench.report import Comparison
from d3d_ray.bench.timeline import draw_timeline
from d3d_ray.bench.trace import write_trace
from d3d_ray.models.text import IncrementalText
from d3d_ray.records import Mode
from d3d_ray.runtime.engine import Answer, Engine


def generate(engine: Engine, options: Options) -> int:
    """Print the answers or the table, write what was asked for; the exit code.

    Answers and tables go to stdout, everything else to stderr. Raises as ``Engine.generate``.
    """
    if options.is_comparison:
        result = compare(
            engine,
            options.prompts,
            options.sampling,
            modes=options.modes,
            on_answer=_print_answer,
        )
        print(result.table())
    else:
        (mode,) = options.modes
        if len(options.prompts) == 1:
            result = asyncio.run(_stream(engine, options, mode))
        else:
            result = compare(
                engine, options.prompts, options.sampling, modes=[mode], on_answer=_print_answer
            )
        print(result.line(mode), file=sys.stderr)
    _write_files(result, options)
    return 1 if result.num_violations else 0


async def _stream(engine: Engine, options: Options, mode: Mode) -> Comparison:
    text = IncrementalText(engine.tokenizer)
    (prompt,) = options.prompts
    chunks = engine.stream(prompt.messages, options.sampling, mode=mode)
    async for chunk in chunks:
        print(text.push(chunk.tokens), end="", flush=True)
    print(text.finish())
    return make_comparison(engine, options.sampling, 1, {mode: list(chunk.rounds)})


def _print_answer(prompt: NamedPrompt, mode: Mode, answer: Answer) -> None:
    line = {
        "id": prompt.id,
        "mode": mode,
        "text": answer.text,
        "num_tokens": len(answer.tokens),
        "finish": answer.finish,
    }
    tqdm.write(json.dumps(line, ensure_ascii=False), file=sys.stdout)
    sys.stdout.flush()


def _write_files(result: Comparison, options: Options) -> None:
    if options.json_file is not None:
        text = json.dumps(result.to_json(), indent=2, ensure_ascii=False)
        options.json_file.write_text(text + "\n", encoding="utf-8")
    if options.trace_file is not None:
        write_trace(options.trace_file, result.rounds, label=result.label())
    if options.timeline_file is not None:
        mode = Mode.ASYNC if Mode.ASYNC in options.modes else options.modes[-1]
        rounds = result.rounds[mode]
        draw_timeline(options.timeline_file, rounds, title=_title(result, mode))
    files = (options.json_file, options.trace_file, options.timeline_file)
    for file in filter(None, files):
        print(f"wrote {_shorten(file)}", file=sys.stderr)


def _title(result: Comparison, mode: Mode) -> str:
    label = result.label(mode)
    title = f"{result.config.name}, mode {mode}, {result.config.target.dtype}"
    return f"{title}: {label}" if label else title


def _shorten(file: Path) -> Path:
    is_near = file.is_absolute() and file.is_relative_to(Path.cwd())
    return file.relative_to(Path.cwd()) if is_near else file
