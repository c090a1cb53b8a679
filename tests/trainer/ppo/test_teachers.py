"""Teachers in the dataflow: which rows each scores, and that a run with several equals runs with each alone."""

import json

import numpy as np
import pytest
import torch

from tests.harness.configs import changed
from tests.harness.models import tiny_model_dir
from tests.harness.rows import addition_rows, write_prompts
from tests.harness.runs import COMMON, prepare, train
from verl.config import leaves, load_config, record_reads
from verl.config.schema.algorithm import DistillationConfig
from verl.config.schema.root import Teacher
from verl.errors import ConfigError, DataError
from verl.protocol import DataProto
from verl.trainer.models import model_roles
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


def test_one_answer_to_each_prompt_is_learned_from(run):
    """As upstream's commands have it: the negative divergence is the advantage, and no rewards are compared."""
    loss = ("loss_mode=k1", "use_task_rewards=false", "use_policy_gradient=true", "loss_max_clamp=10.0")
    words = (f"distillation.distillation_loss.{word}" for word in loss)
    [step] = train(*ALONE, *words, "actor_rollout_ref.rollout.n=1").metrics
    assert step["actor/grad_norm"] > 0 and step["distillation/rows/teacher_model"] == 4


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


def test_a_head_with_rows_of_padding_serves_estimators_alone(run):
    tiny_model_dir("padded", vocab=300)
    padded = (*ON, "distillation.teacher_models.teacher_model.model_path=padded")
    assert train(*padded).metrics[0]["distillation/abs_loss"] > 0
    with pytest.raises(ConfigError, match="head has 259 rows and this teacher's 300") as caught:
        train(*padded, *TOP_K)
    assert caught.value.key == "distillation.teacher_models.teacher_model.model_path"


def test_a_teacher_with_other_tokens_is_refused(run):
    file = tiny_model_dir("other") / "tokenizer.json"
    tokens = json.loads(file.read_text())
    vocabulary = tokens["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]
    file.write_text(json.dumps(tokens))
    with pytest.raises(ConfigError, match=r"other tokens than its student \(2 differ, such as 'a'\)"):
        train(*ON, "distillation.teacher_models.teacher_model.model_path=other")


def test_a_number_is_a_key_like_any_other(run):
    rows = [{**row, "level": n % 2} for n, row in enumerate(addition_rows(8))]
    write_prompts("train.parquet", rows)
    words = ("distillation.teacher_key=level", "data.shuffle=false")
    both = (
        "+distillation.teacher_models.0={model_path: first, key: 0}",
        "+distillation.teacher_models.rest.model_path=second",
    )
    metrics = train(*ON, *words, *both).metrics[0]
    assert [metrics[f"distillation/rows/teacher_{name}"] for name in ("0", "rest")] == [8, 8]


def test_a_quantized_policy_leaves_its_teacher_in_full_precision(run):
    words = ("actor_rollout_ref.model.lora_rank=4", "actor_rollout_ref.model.lora_base_quantization=nf4")
    config = load_config(
        "ppo_trainer",
        changed(COMMON, *ALONE, *words, "+actor_rollout_ref.model.override_config={num_hidden_layers: 1}"),
    )
    model = model_roles(config)["teacher_model"].model
    assert (model.lora_base_quantization, model.lora_rank, model.override_config) == (None, 0, {})
