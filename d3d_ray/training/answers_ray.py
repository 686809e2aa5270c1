"""Ray Data spreads the batches over workers, each with the target on a device of its own."""

import logging
import re
from collections.abc import Iterator, Sequence
from typing import Any

import pyarrow as pa  # type: ignore[import-untyped]
import ray
import ray.data
from ray.exceptions import RayError

from d3d_ray.config import TargetConfig
from d3d_ray.training.answer_options import AnswerSettings
from d3d_ray.training.answering import Answerer
from d3d_ray.training.answers_store import WORK_SCHEMA, to_table
from d3d_ray.training.questions import Question


def answer_on_workers(
    target: TargetConfig,
    settings: AnswerSettings,
    batches: Sequence[Sequence[Question]],
    *,
    num_workers: int,
    num_gpus: int = 1,
) -> Iterator[pa.Table]:
    """The answers of each batch as a table for a shard, in the order in which they are ready.

    Connects to the Ray cluster that is there, or starts one on this machine. A worker takes
    ``num_gpus`` GPUs where the cluster has GPUs, else one CPU core. Raises ``ValueError``
    when the cluster is too small.
    """
    if not ray.is_initialized():
        ray.init(include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
    resources = _resources(num_gpus, num_workers)
    logging.getLogger("ray.data").setLevel(logging.ERROR)
    ray.data.DataContext.get_current().enable_progress_bars = False
    # One table is one block, so a worker gets a whole batch and gives back a whole shard.
    answered = ray.data.from_arrow([_to_table(batch) for batch in batches]).map_batches(
        _Worker,
        fn_constructor_args=(target, settings, num_gpus),
        batch_size=None,
        batch_format="pyarrow",
        compute=ray.data.ActorPoolStrategy(size=num_workers),
        **resources,
    )
    try:
        yield from answered.iter_batches(
            batch_size=None, batch_format="pyarrow", prefetch_batches=0
        )
    except RayError as error:
        raise RuntimeError(f"a worker failed: {_reason(error)}") from error


def _reason(error: RayError) -> str:
    """What was raised in the worker; Ray keeps it in the text of its own error alone."""
    first = re.search(r"^[\w.]+Error: .*$", str(error), re.MULTILINE)
    return first.group() if first else str(error)


def _resources(num_gpus: int, num_workers: int) -> dict[str, Any]:
    there = ray.cluster_resources()
    kind, each = ("GPU", num_gpus) if there.get("GPU", 0) else ("CPU", 1)
    if there.get(kind, 0) < each * num_workers:
        raise ValueError(
            f"{num_workers} workers of {each} {kind} do not fit in the cluster's "
            f"{there.get(kind, 0):g} {kind}: ask for fewer workers"
        )
    return {"num_gpus": each} if kind == "GPU" else {"num_cpus": each}


def _to_table(batch: Sequence[Question]) -> pa.Table:
    names = WORK_SCHEMA.names
    columns = {name: [getattr(question, name) for question in batch] for name in names}
    return pa.table(columns, schema=WORK_SCHEMA)


class _Worker:
    def __init__(self, target: TargetConfig, settings: AnswerSettings, num_gpus: int) -> None:
        self._answerer = Answerer.load(target, settings, num_gpus=num_gpus)

    def __call__(self, batch: pa.Table) -> pa.Table:
        questions = [
            Question(
                id=row["id"],
                dataset=row["dataset"],
                prompt_ids=tuple(row["prompt_ids"]),
                answer_ids=None if row["answer_ids"] is None else tuple(row["answer_ids"]),
            )
            for row in batch.to_pylist()
        ]
        return to_table(self._answerer.answer(questions))
