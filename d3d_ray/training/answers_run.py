"""From options to a folder of answers, here or on Ray workers, with a progress bar."""

import sys
from collections.abc import Iterator, Sequence

import pyarrow as pa  # type: ignore[import-untyped]
import pyarrow.compute as pc  # type: ignore[import-untyped]
from tqdm import tqdm

from d3d_ray.models.loading import load_config, load_tokenizer
from d3d_ray.training.answer_options import Options
from d3d_ray.training.answering import Answerer
from d3d_ray.training.answers_store import AnswersStore, to_table
from d3d_ray.training.questions import Question, make_batches, read_answered, render


def answer_all(options: Options) -> None:
    """Answer whatever the folder does not hold, a shard a batch.

    Raises ``ValueError`` for what the target or the folder cannot take.
    """
    questions = _drop_long(_read(options), _max_context(options))
    with AnswersStore(options.out, options.provenance) as store:
        batches = _missing(make_batches(questions, options.batch_size), store)
        num_missing = sum(map(len, batches))
        num_known = len(questions) - num_missing
        with tqdm(total=len(questions), initial=num_known, unit="row", smoothing=0.1) as bar:
            num_tokens = 0
            for table in _answer(options, batches):
                store.write(table)
                num_tokens += pc.sum(pc.list_value_length(table["answer_ids"])).as_py()
                bar.set_postfix_str(f"{num_tokens / bar.format_dict['elapsed']:.0f} tokens/s")
                bar.update(table.num_rows)
        print(f"{options.out}: {num_missing} rows answered now, {len(store)} in all")


def _read(options: Options) -> list[Question]:
    if options.answered:
        return read_answered(options.answered)
    tokenizer = load_tokenizer(options.target.source)
    return list(render(options.tasks, tokenizer, thinking=options.thinking))


def _answer(options: Options, batches: Sequence[Sequence[Question]]) -> Iterator[pa.Table]:
    if not batches:
        return
    if options.num_workers > 1:
        from d3d_ray.training.answers_ray import answer_on_workers  # It takes seconds.

        yield from answer_on_workers(
            options.target,
            options.settings,
            batches,
            num_workers=options.num_workers,
            num_gpus=options.num_gpus,
        )
        return
    answerer = Answerer.load(options.target, options.settings, num_gpus=options.num_gpus)
    for batch in batches:
        yield to_table(answerer.answer(batch))


def _missing(batches: Sequence[Sequence[Question]], store: AnswersStore) -> list[list[Question]]:
    rest = [
        [q for q in batch if not store.holds(q.key, q.prompt_ids + (q.answer_ids or ()))]
        for batch in batches
    ]
    return [batch for batch in rest if batch]


def _max_context(options: Options) -> int:
    of_model = load_config(options.target.source).get_text_config(decoder=True)
    limits = (getattr(of_model, "max_position_embeddings", None), options.target.max_context)
    return min((limit for limit in limits if limit is not None), default=sys.maxsize)


def _drop_long(questions: Sequence[Question], max_context: int) -> list[Question]:
    fitting = [
        question
        for question in questions
        if len(question.prompt_ids) + len(question.answer_ids or (0,)) <= max_context
    ]
    if len(fitting) < len(questions):
        print(
            f"{len(questions) - len(fitting)} of {len(questions)} rows are left out: they fill "
            f"the context of {max_context} tokens",
            file=sys.stderr,
        )
    return fitting
