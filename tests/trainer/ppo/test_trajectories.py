"""Several trajectories of one sample: its rows share an advantage, it counts once, and nothing is lost or doubled."""

from __future__ import annotations

import shutil
from contextlib import nullcontext
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from tests.harness.algorithms import actor_config
from tests.harness.compaction import WORDS, write_loops
from tests.harness.runs import differing, records, train
from tests.trainer.ppo.test_stages import context
from verl.agent_loop import AgentLoopOutput
from verl.agent_loop.batch import to_batch
from verl.agent_loop.unfinished import output_of, plain_output, trajectories_before
from verl.algorithms.aggregation import LOSS_AGG_MODES, loss_norm
from verl.algorithms.losses import PPOPolicyLoss, loss_of_rows
from verl.errors import ConfigError, NotBuiltError, ReplayError
from verl.journal.schedule import Notes, end_entry, recorded_draws
from verl.protocol import DataProto
from verl.protocol.fields import SHARES
from verl.trainer.ppo import accounting, group_filter, stages
from verl.trainer.ppo.callbacks import ShowSamples
from verl.trainer.ppo.group_filter import DETAILS
from verl.trainer.ppo.groups import oldest_versions
from verl.trainer.ppo.metric_utils import compute_data_metrics
from verl.trainer.ppo.ray_trainer import RayPPOTrainer
from verl.trainer.ppo.sample_rows import as_sequences, last_rows, sample_numbers
from verl.trainer.ppo.trajectories import as_rows, check_branches, sampled_tokens


def output(prompt: list[int], response: list[int], version: int = 3, **more) -> AgentLoopOutput:
    log_probs = [-0.25 * token for token in response]
    versions = [version] * len(response)
    return AgentLoopOutput(prompt, response, [1] * len(response), log_probs, token_versions=versions, **more)


def samples(**columns: list) -> DataProto:
    """Two samples of one prompt: the first with three trajectories, which are scored 1, the second with one, 0."""
    before = [output([1], [2, 3], version=1), output([1, 2, 3], [4])]
    outputs = [output([7], [5, 6, 7], before=before), output([1], [8])]
    made = to_batch(outputs, pad_token_id=0)
    scores = torch.zeros(2, 3)
    scores[0, 2] = 1.0
    made.tensors["token_level_scores"] = scores
    arrays = {name: np.array(column, dtype=object) for name, column in columns.items()}
    uids = {"uid": np.array(["a", "a"], dtype=object), "sample_index": np.array([0, 1], dtype=object)}
    made.non_tensor_batch |= uids | trajectories_before(outputs) | arrays
    return made


def test_each_trajectory_is_a_row_before_that_of_its_sample():
    ctx = context()
    rows = as_rows(samples(acc=[0.5, 0.0]), ctx)
    tensors, columns = rows.tensors, rows.non_tensor_batch
    assert tensors["prompts"].tolist() == [[0, 0, 1], [1, 2, 3], [0, 0, 7], [0, 0, 1]]
    assert tensors["responses"].tolist() == [[2, 3, 0], [4, 0, 0], [5, 6, 7], [8, 0, 0]]
    assert tensors["input_ids"][1].tolist() == [1, 2, 3, 4, 0, 0]
    assert tensors["attention_mask"].tolist()[:2] == [[0, 0, 1, 1, 1, 0], [1, 1, 1, 1, 0, 0]]
    assert tensors["rollout_log_probs"].tolist()[:2] == [[-0.5, -0.75, 0.0], [-1.0, 0.0, 0.0]]
    assert tensors["token_level_scores"].sum(-1).tolist() == [0.0, 0.0, 1.0, 0.0]
    assert columns["trajectory_number"].tolist() == [0, 1, 2, 0]
    assert columns["sample_index"].tolist() == [0, 0, 0, 1] and columns["acc"].tolist() == [0.5, 0.5, 0.5, 0.0]
    assert "trajectories_before" not in columns
    assert ctx.metrics.values()["training/trajectories_per_sample/mean"] == 2.0
    assert ctx.metrics.values()["training/trajectories_per_sample/max"] == 3
    assert last_rows(rows).tensors["responses"].tolist() == [[5, 6, 7], [8, 0, 0]]


def test_a_sample_is_as_old_and_as_long_as_all_its_trajectories():
    assert sampled_tokens(samples()) == [6, 1]
    assert oldest_versions(samples(), 1) == [1], "the first trajectory is of version 1, the others of 3"


def test_a_batch_of_single_trajectories_stays_the_object_that_it_is():
    batch = samples()
    del batch.non_tensor_batch["trajectories_before"]
    assert as_rows(batch, context()) is batch and sample_numbers(batch) is None


def test_a_masked_sample_is_masked_in_all_its_rows():
    rows = as_rows(samples(unscorable=[True, False]), context())
    assert rows.tensors["response_mask"].sum(-1).tolist() == [0, 0, 3, 1], "the scorer masks the last row itself"


def test_what_a_scorer_returned_is_of_the_sample_and_not_of_a_loop():
    batch = samples(acc=[0.5, 0.0])
    batch.non_tensor_batch["trajectories_before"][0][0]["extra_fields"] = {"acc": 9.0, "tool": "t"}
    batch.meta_info[DETAILS] = ["acc"]
    columns = as_rows(batch, context()).non_tensor_batch
    assert columns["acc"].tolist() == [0.5, 0.5, 0.5, 0.0] and columns["tool"].tolist() == ["t", None, None, None]


def test_rows_of_a_sample_share_its_advantage_among_samples():
    rows = as_rows(samples(), context())
    stages.add_advantages(rows, context())
    # two samples, 1 and 0: mean 0.5, standard deviation 0.70710678; over the four rows the mean would be 0.25
    value = 0.5 / (0.70710678 + 1e-6)
    expected = [[value, value, 0], [value, 0, 0], [value] * 3, [-value, 0, 0]]
    torch.testing.assert_close(rows.tensors["advantages"], torch.tensor(expected), atol=1e-6, rtol=0)


def test_a_critics_advantages_go_through_trajectories_in_their_order():
    ctx = context(**{"algorithm.adv_estimator": "gae", "algorithm.gamma": 0.5, "algorithm.lam": 1.0})
    rows = as_rows(samples(), ctx)
    rows.tensors["values"] = torch.zeros(4, 3)
    stages.add_advantages(rows, ctx)
    # six tokens, the score 1 at the last one, discounted by a half per token; the values are 0
    expected = [[1 / 32, 1 / 16, 0], [1 / 8, 0, 0], [1 / 4, 1 / 2, 1], [0, 0, 0]]
    torch.testing.assert_close(rows.tensors["returns"], torch.tensor(expected), atol=0, rtol=0)


def loss_of(batch: DataProto, log_probs: torch.Tensor, mode: str) -> torch.Tensor:
    """The sum over micro-batches of one and two rows."""
    norm = loss_norm(batch.tensors["response_mask"], shares=batch.tensors[SHARES])
    loss, parts = PPOPolicyLoss(actor_config(loss_agg_mode=mode), 10), []
    for rows in (slice(0, 1), slice(1, 3)):
        tensors = batch.batch[rows]
        parts.append(loss_of_rows(loss, {"log_probs": log_probs[rows]}, tensors, norm)[0])
    return sum(parts)


@pytest.mark.parametrize("mode", LOSS_AGG_MODES)
def test_rows_of_a_sample_in_two_micro_batches_have_the_loss_of_one(mode):
    cut_mask = torch.tensor([[1, 1], [1, 0], [1, 1]])
    advantages, log_probs = torch.tensor([[2.0, 2.0], [2.0, 0.0], [-1.0, -1.0]]), torch.tensor([-1.0, -2, -3, -4, -5])
    old = log_probs - torch.tensor([0.1, -0.05, 0.15, 0.0, -0.1])
    cut = torch.zeros(3, 2).masked_scatter(cut_mask.bool(), log_probs).requires_grad_()
    batch = {
        "response_mask": cut_mask,
        "advantages": advantages,
        "old_log_probs": torch.zeros(3, 2).masked_scatter(cut_mask.bool(), old),
    }
    rows = DataProto.from_dict(tensors=batch)
    as_sequences(rows, [0, 1, 2], np.array([0, 0, 1]))
    torch.testing.assert_close(rows.tensors[SHARES], torch.tensor([2 / 3, 1 / 3, 1.0]))
    loss = loss_of(rows, cut, mode)

    ratio = torch.tensor([0.1, -0.05, 0.15, 0.0, -0.1]).exp()
    terms = -ratio * torch.tensor([2.0, 2.0, 2.0, -1.0, -1.0])  # none is clipped
    by_sample = terms[:3], terms[3:]
    expected = {
        "token-mean": terms.mean(),
        "token-sum": terms.sum(),
        "seq-mean-token-sum": sum(x.sum() for x in by_sample) / 2,
        "seq-mean-token-mean": sum(x.mean() for x in by_sample) / 2,
        "seq-mean-token-sum-norm": sum(x.sum() for x in by_sample) / (2 * 10),
    }[mode]
    torch.testing.assert_close(loss, expected, atol=1e-6, rtol=0)
    (slopes,) = torch.autograd.grad(loss, cut)
    per_token = {"seq-mean-token-mean": [1 / 6] * 3 + [1 / 4] * 2, "token-mean": [1 / 5] * 5, "token-sum": [1.0] * 5}
    scale = torch.tensor(per_token.get(mode, [0.05 if mode.endswith("norm") else 0.5] * 5))
    torch.testing.assert_close(slopes[cut_mask.bool()], terms * scale, atol=1e-6, rtol=0)


class Role(SimpleNamespace):
    """A trainable role over ``num_parts`` ranks that keeps what it is given."""

    name, epochs, shuffle, seed = "actor", 1, False, 0

    def train(self, mini_batch, options):
        self.seen.append(mini_batch)
        return SimpleNamespace(items=lambda: (), values=dict)


@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_a_mini_batch_has_whole_samples_and_as_many_rows_for_each_rank(ranks):
    one, other = samples(), samples(uid=["b", "b"])
    ctx = context()
    rows = as_rows(DataProto.concat([one, other]), ctx)
    stages.add_advantages(rows, ctx)
    role = Role(seen=[], num_parts=ranks, mini_batch_size=1)
    stages.train(role, rows, ctx)
    assert len(role.seen) == 2, "one prompt, two samples each"
    for mini_batch in role.seen:
        tensors = mini_batch.tensors
        assert len(mini_batch) % ranks == 0 and len(mini_batch) == -(-4 // ranks) * ranks
        assert int(tensors["response_mask"].sum()) == 7, "a row that fills up the ranks has no token"
        assert sorted(tensors["responses"][tensors["response_mask"].bool()].tolist()) == [2, 3, 4, 5, 6, 7, 8]
        assert float(tensors[SHARES].sum()) == pytest.approx(2.0, abs=1e-6)


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("algorithm.use_pf_ppo", True),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "geo_mean"),
        ("algorithm.adv_estimator", "gigpo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "recipe.sppo.core:sppo"),
        ("actor_rollout_ref.actor.policy_loss.loss_mode", "recipe.flowrl.core:flow_balance"),
        ("trainer.v1.trainer_mode", "recipe.prime.schedule:PrimeSchedule"),
        ("trainer.v1.trainer_mode", "recipe.rep_exp.schedule:RepExpSchedule"),
    ],
)
def test_a_method_that_takes_rows_for_samples_is_refused_by_name(key, value):
    with pytest.raises(ConfigError, match=f"{key}: this method takes each row for a sample"):
        as_rows(samples(turn_states=[None, None]), context(**{key: value}))


def test_the_policy_loss_of_a_distillation_is_one_of_the_methods():
    changes = {"enabled": True, "distillation_loss.use_policy_gradient": True}
    changes = {f"distillation.{key}": value for key, value in changes.items()}
    key = "distillation.distillation_loss.policy_loss_mode"
    with pytest.raises(ConfigError, match=f"{key}: this method takes each row for a sample"):
        as_rows(samples(), context(**changes, **{key: "geo_mean"}))


@pytest.mark.parametrize("branches", ["rows", "last"])
def test_an_agent_with_branches_as_rows_is_refused_before_the_first_step(tmp_path, branches):
    file = tmp_path / "loops.yaml"
    file.write_text(f"- {{name: a, _target_: b.C, branches: {branches}}}")
    words = {"actor_rollout_ref.rollout.agent.agent_loop_config_path": str(file), "algorithm.use_pf_ppo": True}
    refused = pytest.raises(ConfigError, match="use_pf_ppo: this method") if branches == "rows" else nullcontext()
    with refused:
        check_branches(context(**words).config, sees=False)


def test_a_trainer_of_a_model_that_sees_refuses_branches_as_rows(tmp_path):
    file = tmp_path / "loops.yaml"
    file.write_text("- {name: a, _target_: b.C, branches: rows}")
    config = context(**{"actor_rollout_ref.rollout.agent.agent_loop_config_path": str(file)}).config
    with pytest.raises(NotBuiltError, match=r"agent_loop_config_path, branches: .* a model that sees pictures"):
        RayPPOTrainer(config, None, {}, None, processor=object())


def test_the_kl_in_the_reward_is_measured_over_samples():
    rows, ctx = as_rows(samples(), context()), context(**{"algorithm.kl_ctrl.kl_coef": 0.5})
    rows.tensors["old_log_probs"] = torch.zeros(4, 3)
    rows.tensors["ref_log_prob"] = torch.tensor([[-1.0, -1, 9], [-10.0, 9, 9], [0.0, 0, 0], [-3.0, 9, 9]])
    seen = []
    ctx.run.kl_controller.update = lambda current_kl, n_steps: seen.append((current_kl, n_steps))
    stages.charge_kl(rows, ctx.run.kl_controller)
    # means of 12 / 6 and 3 / 1 over the tokens of the two samples; those of the four rows are 1, 10, 0 and 3
    assert seen == [(pytest.approx(2.5), 2)]
    expected = [[-0.5, -0.5, 0], [-5.0, 0, 0], [0, 0, 1.0], [-1.5, 0, 0]]
    torch.testing.assert_close(rows.tensors["token_level_rewards"], torch.tensor(expected), atol=0, rtol=0)


def test_right_answers_and_calls_of_tools_are_counted_over_samples():
    ctx = context(**{"actor_rollout_ref.actor.positive_lm_coef": 0.1})
    rows = as_rows(samples(tool_call_counts=[4, 2]), ctx)
    stages.add_advantages(rows, ctx)
    metrics = compute_data_metrics(rows, use_critic=False)
    assert metrics["tool_call_counts/mean"] == 3.0, "over the four rows it were 3.5"
    assert ctx.metrics.values()["training/positive_samples"] == 0.5, "over the four rows it were 0.75"


def test_samples_on_the_console_have_the_score_of_their_last_row():
    rows, shown = as_rows(samples(), context()), []

    class Trainer(SimpleNamespace):
        def describe_samples(self, batch):
            shown.extend(group_filter.outcomes(batch, None).tolist())
            return {"inputs": [], "outputs": [], "scores": [], "gts": [], "reward_extra_infos": {}}

    texts = SimpleNamespace(questions=lambda *_: [], pictures=lambda *_: [])
    settings = SimpleNamespace(trainer=SimpleNamespace(log_train_generations=1, test_freq=0))
    trainer = Trainer(config=settings, ctx=SimpleNamespace(step=1), texts=texts, show_samples=lambda *_: None)
    ShowSamples().on_step_end(trainer, rows)
    assert shown == [1.0]


class Ledger:
    """Keeps what an update trained on, and why not on the rest."""

    def __init__(self):
        self.keys, self.dropped = [], {}

    def trained(self, step, keys, by_reason):
        self.keys, self.dropped = keys, by_reason


@pytest.mark.parametrize(("error", "reason"), [("it broke", "failed_loop"), (None, "given_up")])
def test_the_ledger_says_of_a_sample_why_its_last_row_is_masked(error, reason):
    made = samples(unscorable=[True, False], finish_reason=["abort", "stop"], agent_error=[error, None])
    made.tensors["response_mask"][0] = 0
    ledger = Ledger()
    run = SimpleNamespace(ledger=ledger, learns_from_pairs=False)
    accounting.trained(as_rows(made, context()), SimpleNamespace(step=1, run=run))
    assert ledger.keys == [("a", 1)] and ledger.dropped == {reason: [("a", 0)]}


def test_a_sample_is_trained_on_if_any_of_its_rows_is():
    ledger = Ledger()
    batch = as_rows(samples(), context())
    batch.tensors["rollout_rs_mask"] = batch.tensors["response_mask"].clone()
    batch.tensors["rollout_rs_mask"][[1, 2, 3]] = 0  # rejected, all but the first trajectory of the first sample
    run = SimpleNamespace(ledger=ledger, learns_from_pairs=False)
    accounting.trained(batch, SimpleNamespace(step=1, run=run))
    assert ledger.keys == [("a", 0)] and ledger.dropped == {"rejected": [("a", 1)]}


STEPS = (*WORDS, "actor_rollout_ref.actor.optim.lr=1e-2", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
         "trainer.total_training_steps=2", "trainer.save_freq=1", "trainer.resume_mode=auto")  # fmt: skip
QUEUED = ("trainer.v1.trainer_mode=fully_async", "async_training.staleness_threshold=1")
SCHEDULES = {"sync": (), "queued": QUEUED, "ahead": ("trainer.v1.trainer_mode=one_step_off",)}


@pytest.fixture
def folder(here):
    write_loops(here)
    return here


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_run_trains_on_all_trajectories_and_a_resumed_one_gives_the_same_bits(folder, schedule):
    words = (*STEPS, *SCHEDULES[schedule], "trainer.rollout_data_dir=dumps")
    straight = train(*words, "trainer.default_local_dir=straight")
    account = straight.trainer.state.ledger.account
    each = 32 if schedule == "queued" else 16
    assert not account.faults and account.trained == 2 * each, "samples, not rows"
    for batch, metrics in zip(straight.batches, straight.metrics, strict=True):
        assert len(batch) > each == len(last_rows(batch)), "some samples were compacted"
        assert metrics["training/trajectories_per_sample/mean"] == pytest.approx(len(batch) / each)
        assert metrics["training/trajectories_per_sample/max"] == 2
        if schedule == "sync":
            assert metrics["training/rollout_probs_diff_max"] < 1e-4, "the trainer sees the contexts of the sampler"
        advantages, samples_of = batch.tensors["advantages"], sample_numbers(batch)
        for number in np.flatnonzero(np.bincount(samples_of) == 2):
            first, last = advantages[samples_of == number]
            assert first[0] == last[0]
    (dumped,) = [records(file) for file in folder.glob("dumps*/1.jsonl")]
    assert {row["trajectory_number"] for row in dumped} == {0, 1} and len(dumped) == len(straight.batches[0])
    scores = {}
    for row in dumped:
        scores.setdefault((row["uid"], row["sample"]), set()).add(row["score"])
    assert len(scores) == each and all(len(of_sample) == 1 for of_sample in scores.values())

    shutil.copytree("straight/global_step_1", "stopped/global_step_1")
    assert (folder / "stopped/global_step_1/queue").exists() == (schedule != "sync"), "samples of step 2 are in it"
    rest = train(*words, "trainer.default_local_dir=stopped")
    assert differing("straight/global_step_2/actor", "stopped/global_step_2/actor") == []
    assert len(rest.batches) == 1 and not rest.trainer.state.ledger.account.faults


def test_a_critic_learns_from_rows_and_their_order(folder):
    words = ("algorithm.adv_estimator=gae", "algorithm.use_kl_in_reward=true", "critic.ppo_mini_batch_size=2")
    seen = train(
        *STEPS, *words, "trainer.total_training_steps=1", "actor_rollout_ref.actor.loss_agg_mode=seq-mean-token-mean"
    )
    (batch,), (metrics,) = seen.batches, seen.metrics
    assert len(batch) > 16 and metrics["critic/vf_loss"] > 0 and metrics["actor/grad_norm"] > 0
    returns, samples_of = batch.tensors["returns"], sample_numbers(batch)
    (number, *_) = np.flatnonzero(np.bincount(samples_of) == 2)
    rows = np.flatnonzero(samples_of == number)
    rewards, mask = batch.tensors["token_level_rewards"][rows], batch.tensors["response_mask"][rows]
    # undiscounted: what is still to come in both trajectories
    torch.testing.assert_close(returns[rows[0], 0], (rewards * mask).sum(), atol=1e-5, rtol=0)


def test_files_and_states_of_samples_have_all_trajectories(tmp_path):
    samples().save_to_disk(str(tmp_path / "samples.safetensors"))
    loaded = as_rows(DataProto.load_from_disk(str(tmp_path / "samples.safetensors")), context())
    expected = as_rows(samples(), context())
    for name, column in expected.batch.items():
        assert torch.equal(loaded.batch[name], column), name
    (first,) = output_of(plain_output(output([7], [5], before=[output([1], [2, 3], version=1)]))).before
    assert (first.prompt_ids, first.response_ids, first.token_versions) == ([1], [2, 3], [1, 1])


def test_a_replay_does_not_guess_which_request_drew_a_token():
    """The trajectories of a sample may have been sampled in turns, so the record says that their tokens are missing."""
    made = samples()
    served = {f"a-{index}-0": Notes([("r", 1, 1)]) for index in (0, 1)}
    entry = end_entry(4, "", served, lambda: made, boundary=2)
    assert entry["answers"] == {"a-1-0": {"tokens": [8], "log_probs": [-2.0]}}
    with pytest.raises(ReplayError, match="lacks 1 tokens of request a-0-0"):
        recorded_draws(entry, gone=2)
