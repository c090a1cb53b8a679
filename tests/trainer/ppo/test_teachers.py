"""Teachers in the dataflow: which rows each scores, and that a run with several equals runs with each alone."""

import numpy as np
import pytest
import torch

from tests.harness.models import tiny_model_dir
from tests.harness.rows import addition_rows
from tests.harness.runs import prepare, train
from verl.config import leaves, record_reads
from verl.config.schema.distillation import DistillationConfig, Teacher
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.trainer.ppo.teachers import rows_of_teachers

ON = ("distillation.enabled=true", "actor_rollout_ref.actor.optim.lr=1e-3")
ALONE = (*ON, "distillation.teacher_models.teacher_model.model_path=first")
TOP_K = ("distillation.distillation_loss.loss_mode=forward_kl_topk", "distillation.distillation_loss.topk=4")


def teacher(name, serves):
    return Teacher(name, "folder", "key", serves, "auto", None, None)


def batch(*sources):
    column = np.array(sources, dtype=object)
    return DataProto.from_dict({"x": torch.zeros(len(sources), 1)}, non_tensors={"data_source": column})


def routed(teachers, *sources):
    return [rows.tolist() for rows in rows_of_teachers(batch(*sources), teachers, "data_source")]


@pytest.fixture
def run(workplace):
    rows = [{**row, "data_source": ("sums", "poems")[n % 2]} for n, row in enumerate(addition_rows(8))]
    prepare(rows=rows)
    tiny_model_dir("first", seed=5)
    tiny_model_dir("second", seed=6)
    return workplace


def test_one_teacher_without_a_key_scores_every_row():
    assert routed([teacher("a", None)], "sums", "poems") == [[0, 1]]


def test_each_row_is_scored_by_the_teacher_with_its_key():
    teachers = [teacher("a", "sums"), teacher("b", None), teacher("c", "poems")]
    assert routed(teachers, "poems", "sums", "maps", "poems") == [[1], [2], [0, 3]]


def test_rows_without_a_teacher_are_an_error_with_their_keys():
    with pytest.raises(DataError, match="no teacher serves") as caught:
        routed([teacher("a", "sums"), teacher("b", "poems")], "maps", "sums")
    assert caught.value.got == ["maps"] and "distillation.teacher_models" in str(caught.value)


def test_a_batch_without_the_column_names_the_setting():
    rows = DataProto.from_dict({"x": torch.zeros(2, 1)})
    with pytest.raises(DataError, match=r"distillation\.teacher_key"):
        rows_of_teachers(rows, [teacher("a", "sums")], "data_source")


@pytest.mark.parametrize("mode", [(), TOP_K])
def test_two_teachers_score_the_rows_of_their_sources(run, mode):
    both = (
        *ON,
        "+distillation.teacher_models.sums={model_path: first, key: sums}",
        "+distillation.teacher_models.poems={model_path: second, key: poems}",
    )
    column = "candidate_teacher_log_probs" if mode else "teacher_log_probs"
    seen = train(*both, *mode)
    together = seen.batches[0]
    first = train(*ALONE, *mode).batches[0].tensors[column]
    second = train(*ON, "distillation.teacher_models.teacher_model.model_path=second", *mode).batches[0].tensors[column]
    sources = together.non_tensor_batch["data_source"]
    for row, source in enumerate(sources):
        expected = first if source == "sums" else second
        torch.testing.assert_close(together.tensors[column][row], expected[row], atol=1e-6, rtol=0)
    metrics = seen.metrics[0]
    counts = [metrics[f"distillation/rows/teacher_{name}"] for name in ("sums", "poems")]
    assert counts == [sum(sources == "sums"), sum(sources == "poems")] and all(counts)


def test_a_teacher_with_the_students_weights_leaves_nothing_to_learn(run):
    alone = "distillation.distillation_loss.use_task_rewards=false"
    steps = train(*ON, "distillation.teacher_models.teacher_model.model_path=model", alone).metrics
    assert steps[0]["distillation/abs_loss"] < 1e-6 and steps[0]["actor/grad_norm"] < 1e-3


@pytest.mark.parametrize("mode", ["sync", "one_step_off"])
def test_the_divergence_falls_under_a_schedule(run, mode):
    tiny_model_dir("certain", seed=5, initializer_range=0.3)
    words = (f"trainer.v1.trainer_mode={mode}", "trainer.total_training_steps=12", "trainer.total_epochs=6")
    loss = ("distillation.distillation_loss.loss_mode=forward_kl_topk", "distillation.distillation_loss.topk=259")
    teacher = ("distillation.teacher_models.teacher_model.model_path=certain", "actor_rollout_ref.actor.optim.lr=1e-2")
    steps = train(*ON, *words, *loss, *teacher, "distillation.distillation_loss.use_task_rewards=false").metrics
    losses = [step["distillation/loss"] for step in steps]
    assert sum(losses[-3:]) / 3 < 0.9 * sum(losses[:3]) / 3


def test_each_setting_of_distillation_is_read(run):
    with record_reads() as reads:
        train(*ALONE, "distillation.distillation_loss.use_policy_gradient=true", *TOP_K, "distillation.nnodes=0")
    unread = {name for name, _ in leaves(DistillationConfig) if f"distillation.{name}" not in reads}
    assert unread <= {"n_gpus_per_node", "teacher_key"}, "the size of a pool, and what several teachers share rows by"


def test_a_teacher_of_another_vocabulary_is_refused(run):
    tiny_model_dir("other", vocab=300)
    with pytest.raises(ConfigError, match="vocabulary of 259 tokens and this teacher one of 300") as caught:
        train(*ON, "distillation.teacher_models.teacher_model.model_path=other")
    assert caught.value.key == "distillation.teacher_models.teacher_model.model_path"
