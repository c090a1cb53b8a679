"""The SPIN recipe: its loss by hand, the reference that follows the policy, learning, exact resume, wrong settings."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from recipe.spin.core import dpo
from recipe.spin.main_spin import SPIN, main
from tests.harness.programs import run
from tests.harness.runs import logged, prepare, train
from verl.algorithms.aggregation import loss_norm
from verl.checkpoint.tensors import read_tensors
from verl.config import load_config, record_reads
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.trainer.ppo.callbacks import Callback

A, R, FREQ = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "trainer.ref_update_freq"
BETA = SimpleNamespace(dpo_beta=0.1)


def answers() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Two pairs around a prompt without one: log pi, log ref and mask. The first pair is the worked example."""
    mask = torch.tensor([[1, 1, 0], [1, 1, 1], [0, 0, 0], [0, 0, 0], [1, 0, 0], [1, 1, 0]])
    policy = torch.tensor(
        [[-4.0, -6.0, 0.0], [-5.0, -4.0, -3.0], [0, 0, 0], [0, 0, 0], [-1.0, 0.0, 0.0], [-2.0, -1.0, 0.0]]
    )
    reference = torch.tensor(
        [[-5.0, -6.0, 0.0], [-4.0, -4.5, -3.0], [0, 0, 0], [0, 0, 0], [-0.5, 0.0, 0.0], [-2.0, -2.0, 0.0]]
    )
    return policy, reference, mask


def test_the_loss_has_the_worked_numbers_and_a_prompt_without_a_pair_counts_nowhere():
    """h = 1.5 gives 0.620957; h = -1.5 gives 0.620957 + 0.15, since log s(-x) = log s(x) - x."""
    policy, reference, mask = answers()
    loss, metrics = dpo(policy, reference, mask, BETA, loss_norm(mask))
    assert loss.item() == pytest.approx((0.620957 + 0.770957) / 2, abs=1e-6)
    assert metrics["dpo_loss"].value == pytest.approx(loss.item()) and metrics["dpo_loss"].weight == 2
    expected = {"chosen": (0.1 - 0.05) / 2, "rejected": (-0.05 + 0.1) / 2, "margins": 0.0, "accuracies": 0.5}
    for name, value in expected.items():
        assert metrics[f"rewards/{name}"].value == pytest.approx(value, abs=1e-6), name


def test_micro_batches_add_up_also_where_one_has_no_pair():
    policy, reference, mask = answers()
    policy.requires_grad_()
    norm = loss_norm(mask)
    whole, metrics = dpo(policy, reference, mask, BETA, norm)
    (gradient,) = torch.autograd.grad(whole, policy)
    parts = [dpo(policy[r], reference[r], mask[r], BETA, norm) for r in (slice(0, 2), slice(2, 4), slice(4, 6))]
    assert parts[1][1] == {}
    total = torch.stack([loss for loss, _ in parts]).sum()
    torch.testing.assert_close(total, whole)
    torch.testing.assert_close(torch.autograd.grad(total, policy)[0], gradient)
    for name, metric in metrics.items():
        assert parts[0][1][name].merge(parts[2][1][name]).value == pytest.approx(metric.value, rel=1e-6), name


def test_the_gradient_makes_the_chosen_answer_likelier_and_the_rejected_one_less_likely():
    """On the reference h = 0, so that dL/dh = -beta / 2, for each of two pairs half of it."""
    _, reference, mask = answers()
    policy = reference.clone().requires_grad_()
    (found,) = torch.autograd.grad(dpo(policy, reference, mask, BETA, loss_norm(mask))[0], policy)
    sign = torch.tensor([1.0, -1.0, 0.0, 0.0, 1.0, -1.0])[:, None]
    torch.testing.assert_close(found, -0.025 * sign * mask)


# ---- runs ------------------------------------------------------------------------------------------------------


class Watch(Callback):
    """After every step: the actor's weights and the reference's."""

    def __init__(self) -> None:
        self.actor: list[dict] = []
        self.reference: list[dict] = []

    def on_step_end(self, trainer, batch):
        for seen, role in ((self.actor, "actor"), (self.reference, "ref")):
            (worker,) = trainer.roles[role].group.workers
            seen.append({name: tensor.clone() for name, tensor in worker.part.engine.export_weights()})


def equal(one: dict, other: dict) -> bool:
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


@pytest.fixture
def here(workplace):
    prepare(hidden=16, heads=2, kv_heads=1, layers=1)
    return workplace


def spin(steps: int, folder: str, *changes: str, watch: Watch | None = None):
    """Mini-batches of two prompts, shuffled, and three answers of which two are a pair."""
    words = [*SPIN, f"{R}.n=3", f"{A}.ppo_mini_batch_size=2", f"{A}.shuffle=true", f"{A}.optim.lr=1e-2", f"{FREQ}=3",
             f"trainer.total_training_steps={steps}", f"trainer.default_local_dir={folder}", *changes]  # fmt: skip
    keys = [word.partition("=")[0] for word in words]
    return train(*[word for i, word in enumerate(words) if keys[i] not in keys[i + 1 :]], watch=watch)


def test_the_reference_becomes_the_policy_every_so_many_steps_and_a_run_goes_on_bitwise(here):
    watch = Watch()
    whole = spin(5, "whole", "trainer.save_freq=5", watch=watch)
    start = dict(read_tensors(here / "model/model.safetensors"))
    for step, (actor, reference) in enumerate(zip(watch.actor, watch.reference), start=1):
        expected = start if step < 3 else watch.actor[2]
        assert equal(reference, expected), step
        assert equal(reference, actor) == (step == 3)
    assert ["training/ref_updated" in step for step in whole.metrics] == [False, False, True, False, False]
    assert all(step["actor/dpo_loss"] > 0 and "rewards/margins" in step for step in whole.metrics)

    spin(4, "cut", "trainer.save_freq=4")
    (saved,) = (here / "cut/global_step_4/ref/huggingface").glob("*.safetensors")
    assert equal(dict(read_tensors(saved)), watch.reference[3]), "neither the first model nor the policy of this step"
    changed = [f"{FREQ}=null", "trainer.resume_changed=accept"]
    resumed = spin(5, "cut", "trainer.save_freq=5", "trainer.resume_mode=auto", *changed)
    clocks = ("timing", "perf/")
    assert {k: v for k, v in resumed.metrics[-1].items() if not k.startswith(clocks)} == {
        k: v for k, v in whole.metrics[-1].items() if not k.startswith(clocks)
    }
    for part in ("actor", "ref"):  # the reference that has moved is kept, also by a run that moves it no more
        files = [here / f"{name}/global_step_5/{part}/huggingface" for name in ("whole", "cut")]
        one, other = ({k: t for f in x.glob("*.safetensors") for k, t in read_tensors(f).items()} for x in files)
        assert one and equal(one, other), part


@pytest.mark.slow
def test_a_run_by_the_recipe_raises_the_reward(lower_case_task: Path):
    settings = [
            "data.train_files=train.jsonl", "data.train_batch_size=8", "data.max_prompt_length=64",
            "data.max_response_length=6", "actor_rollout_ref.model.path=model", f"{A}.ppo_mini_batch_size=4",
            f"{A}.optim.lr=3e-2", "reward.custom_reward_function.path=scorer.py", "trainer.logger=[file]",
            "trainer.resume_mode=disable", "trainer.total_training_steps=12", "trainer.experiment_name=spin",
    ]  # fmt: skip
    with record_reads() as found:
        status = main(settings)
    assert {f"{A}.dpo_beta", FREQ} <= found
    steps = logged("logs/verl-spin", "spin")
    means = [step["critic/score/mean"] for step in steps]
    assert status == 0 and len(means) == 12
    assert sum(means[-3:]) / 3 > sum(means[:2]) / 2 + 0.4, means
    for step in steps:
        assert step["training/pairs"] == 8 * (1 - step["training/tied_prompts"])
        assert step["training/ref_updated"] == 1 and step["training/old_log_prob_skipped"] == 1


# ---- settings --------------------------------------------------------------------------------------------------


def words(*changes: str) -> list[str]:
    made = [*SPIN, "data.train_files=train.parquet", "actor_rollout_ref.model.path=model", "data.train_batch_size=4",
            f"{A}.ppo_mini_batch_size=4", "reward.custom_reward_function.path=scorer.py", *changes]  # fmt: skip
    keys = [word.partition("=")[0] for word in made]
    return [word for i, word in enumerate(made) if keys[i] not in keys[i + 1 :]]


WRONG = {
    f"{R}.n=1": f"{R}.n",
    f"{R}.n=1 algorithm.adv_estimator=gae {A}.policy_loss.loss_mode=recipe.spin.core.dpo": "the best and the worst",
    f"{R}.n=1 algorithm.adv_estimator=gae": "the best and the worst of several answers",
    f"{R}.do_sample=false": f"{R}.do_sample",
    f"{FREQ}=0": f"{FREQ}: out of range",
    f"{FREQ}=-1": f"{FREQ}: out of range",
    f"{A}.dpo_beta=0": f"{A}.dpo_beta: out of range",
    f"{A}.dpo_beta=-0.1": f"{A}.dpo_beta: out of range",
    "actor_rollout_ref.model.lora_rank=8": "has no weights of its own",
    "trainer.resource_pools={p:{roles:[ref],processes:[1]}}": "Leave ref out of trainer.resource_pools",
    f"trainer.n_gpus_per_node=2 {A}.ppo_mini_batch_size=1": "as many whole pairs as the others",
    f"{A}.ppo_micro_batch_size_per_gpu=1": "the two rows of a pair go through the model together",
    f"{A}.ppo_micro_batch_size=1": "the two rows of a pair go through the model together",
    f"{A}.use_dynamic_bsz=true {A}.ppo_max_token_len_per_gpu=1100": "the two rows of a pair may have twice",
    "algorithm.use_pf_ppo=true": "no pairs",
    "algorithm.rollout_correction.rollout_is=token": "neither importance weights nor rejected tokens",
    f"{A}.strategy=megatron": "does not keep the rows of a pair",
}


@pytest.mark.parametrize("changes", WRONG)
def test_what_cannot_be_is_said_before_anything_is_loaded(here, changes):
    with pytest.raises(ConfigError) as error:
        load_config("ppo_trainer", words(*changes.split()))
    assert WRONG[changes] in str(error.value)


def test_a_pair_has_the_budgets_of_all_processes_that_share_its_rows(here):
    """Two rows of 512 + 512 tokens, in halves on two processes; the reference has one row at a time."""
    shared = [f"{A}.strategy=fsdp2", f"{A}.fsdp_config.ulysses_sequence_parallel_size=2", f"{A}.use_dynamic_bsz=true"]
    both = [
        "trainer.n_gpus_per_node=2",
        "trainer.device=cpu",
        "data.max_prompt_length=512",
        "data.max_response_length=512",
        *shared,
    ]
    load_config("ppo_trainer", words(*both, f"{A}.ppo_max_token_len_per_gpu=1024"))
    with pytest.raises(ConfigError, match=r"each of 2 processes has its share. Got 1023. Allowed: 1024 or more"):
        load_config("ppo_trainer", words(*both, f"{A}.ppo_max_token_len_per_gpu=1023"))


def test_settings_of_other_losses_have_no_effect_and_so_has_a_frequency_without_a_reference(here):
    load_config("ppo_trainer", words(f"{A}.clip_ratio=0.3", f"{A}.loss_agg_mode=token-sum"))
    assert "no ratio to clip" in notices()[f"{A}.clip_ratio"] and "mean over pairs" in notices()[f"{A}.loss_agg_mode"]
    reset_notices()
    load_config("ppo_trainer", words(f"{A}.policy_loss.loss_mode=vanilla"))
    assert "without a reference policy" in notices()[FREQ]
    with pytest.raises(ConfigError, match="dpo_beta: unknown setting"):
        load_config("ppo_trainer", words(f"{A}.policy_loss.loss_mode=vanilla", f"{A}.dpo_beta=0.2"))


def test_the_command_line_wins_over_the_recipe(capsys: pytest.CaptureFixture[str]):
    with pytest.raises(SystemExit) as left:
        main([f"{A}.dpo_beta=0.5", f"{FREQ}=null", "--cfg", "job"])
    assert not left.value.code
    said = capsys.readouterr().out
    assert "dpo_beta: 0.5" in said and "ref_update_freq: null" in said and "recipe.spin.core:dpo" in said


def test_the_script_gives_settings_that_are_accepted_and_those_of_its_command_line_last(project_root, here):
    words = ["bash", str(project_root / "recipe/spin/run_spin.sh"), "trainer.device=cpu"]
    shown = run(words, SHOW="1").stdout
    given = shown.splitlines()
    assert given[-1] == "trainer.device=cpu" and f"{FREQ}=1" in given
    ours = ["actor_rollout_ref.model.path=model", f"{R}.name=hf", "data.val_files=null", "trainer.n_gpus_per_node=1",
            "data.train_files=train.parquet"]  # fmt: skip
    replaced = {word.partition("=")[0] for word in ours}
    known = [word for word in given if word.partition("=")[0] not in replaced]
    config = load_config("ppo_trainer", [*SPIN, *known, *ours])
    assert config.actor_rollout_ref.actor.ppo_mini_batch_size == 64 and config.data.train_batch_size == 1024
