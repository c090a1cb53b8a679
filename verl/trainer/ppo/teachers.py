"""Log-probs of teachers (`verl.algorithms.distillation`): one stage, between the samples and their advantages."""

from __future__ import annotations

import numpy as np

from verl.algorithms.distillation import OF_CANDIDATES, OF_TOKEN
from verl.config.schema.algorithm import TOP_K_KINDS
from verl.config.schema.root import Teacher, teachers_of
from verl.errors import DataError
from verl.protocol import CANDIDATES, DataProto
from verl.protocol.lazy import fetched, scattered_rows
from verl.trainer.ppo import experts
from verl.trainer.ppo.context import StepContext
from verl.workers.options import InferOptions
from verl.workers.roles import Roles

COLUMNS = (OF_TOKEN, CANDIDATES, OF_CANDIDATES)
"""What the actor's loss reads of the teachers."""


def add_teacher_log_probs(batch: DataProto, roles: Roles, ctx: StepContext) -> None:
    """Adds teacher_log_probs (B, T), or candidate_ids and candidate_teacher_log_probs (B, T, K), row by row from the
    teacher that serves it.

    Raises:
        DataError: a row that no teacher serves.
    """
    settings = ctx.config.distillation
    if settings.distillation_loss.loss_mode in TOP_K_KINDS:
        outputs = {"top_k_ids": CANDIDATES, "top_k_log_probs": OF_CANDIDATES}
    else:
        outputs = {"log_probs": OF_TOKEN}
    options = InferOptions(tuple(outputs))
    teachers = list(teachers_of(ctx.config))
    for teacher, rows in zip(teachers, rows_of_teachers(batch, teachers, settings.teacher_key)):
        if not len(rows):
            continue
        inputs = experts.for_pass(batch, teacher.name, ctx)
        inputs = inputs.select_idxs(rows) if len(rows) < len(batch) else inputs
        if ctx.run.teachers is not None and teacher.is_served:
            names = [f"row {row} of the batch of step {ctx.step}" for row in rows]
            tensors = ctx.run.teachers.infer(teacher.name, inputs, names, ctx.metrics)
        else:
            tensors = roles[teacher.name].infer(inputs, options).tensors
        for output, column in outputs.items():
            values = scattered_rows(tensors[output], rows, len(batch))
            earlier = batch.tensors.get(column, None)
            batch.tensors[column] = values if earlier is None else fetched(earlier) + fetched(values)
        ctx.metrics.add(f"distillation/rows/{teacher.name}", len(rows), "sum")


def rows_of_teachers(batch: DataProto, teachers: list[Teacher], column: str) -> list[np.ndarray]:
    """The rows (int64) of each teacher, by the value of ``column``.

    Raises:
        DataError: a row that no teacher serves.
    """
    if len(teachers) == 1 and teachers[0].serves is None:
        return [np.arange(len(batch))]
    if column not in batch.non_tensor_batch:
        fix = "Set distillation.teacher_key to a column of the data, or train with one teacher without a key."
        raise DataError("no row says which teacher serves it", key=column, fix=fix)
    sources = batch.non_tensor_batch[column].astype(str)
    keys = [teacher.serves for teacher in teachers if teacher.serves is not None]
    others = ~np.isin(sources, keys)
    if others.any() and all(teacher.serves is not None for teacher in teachers):
        raise DataError(
            "no teacher serves these rows",
            key=column,
            got=sorted(set(sources[others])),
            allowed=keys,
            fix="Add a teacher to distillation.teacher_models with this key, or one without a key.",
        )
    return [np.flatnonzero(others if teacher.serves is None else sources == teacher.serves) for teacher in teachers]
