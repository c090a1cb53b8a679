"""`rollout.keep_unfinished`: what a step leaves goes on in the next, is trained on once, and is in the checkpoint."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.harness.runs import train
from verl.config import PPOTrainerConfig, replace
from verl.config.rules import losses, sampling
from verl.config.rules.checks import problems_of_rows
from verl.config.schema.root import updates_once
from verl.errors import ConfigError
from verl.metrics import notices
from verl.protocol import DataProto
from verl.protocol.columns import object_array
from verl.trainer.ppo.admission import GroupAdmission
from verl.trainer.ppo.context import RunState
from verl.trainer.ppo.driver import Driver
from verl.trainer.ppo.groups import UNFINISHED, Done, GroupRows
from verl.trainer.ppo.schedules import prompts_in_work
from verl.trainer.ppo.stream import GroupStream

of_losses = problems_of_rows({PPOTrainerConfig: losses.ROWS})
problems = problems_of_rows({PPOTrainerConfig: sampling.OF_OLDER_VERSIONS})
KEEPS = (
    "actor_rollout_ref.rollout.keep_unfinished=true",
    "actor_rollout_ref.rollout.over_sample_rate=0.5",
    "algorithm.rollout_correction.bypass_mode=true",
    "data.train_batch_size=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.optim.lr=1e-2",
    "actor_rollout_ref.rollout.max_num_seqs=5",
    "trainer.save_freq=1",
    "trainer.resume_mode=auto",
)
"""Four prompts in work for two that are trained on, four samples each, five at once."""


def test_a_run_goes_on_with_what_a_step_left_and_a_resumed_one_gives_the_same_bits(here):
    whole = train(*KEEPS, "trainer.total_training_steps=2", "trainer.default_local_dir=whole")
    account, stream = whole.trainer.state.ledger.account, whole.trainer.schedule.stream
    assert [len(batch) for batch in whole.batches] == [8, 8]
    assert account.trained == 16 and not account.faults and not account.dropped
    held = sum(len(part) for part in stream.held_samples())
    assert account.sampled >= 16 and len(account.open) == held > 0
    keys = [
        (u, int(i))
        for b in whole.batches
        for u, i in zip(b.non_tensor_batch["uid"], b.non_tensor_batch["sample_index"])
    ]
    assert len(set(keys)) == 16
    versions = [batch.tensors["token_versions"] for batch in whole.batches]
    mixed = [len(set(row[row >= 0].tolist())) for table in versions for row in table]
    assert max(mixed) > 1, "a response that two versions drew"
    for batch, metrics in zip(whole.batches, whole.metrics):
        assert torch.equal(batch.tensors["old_log_probs"], batch.tensors["rollout_log_probs"])
        assert metrics["rollout/partial/versions/max"] == metrics["training/off_policy/trajectory_spans/max"]
    assert whole.metrics[0]["rollout/partial/left"] > 0 == whole.metrics[0]["rollout/partial/resumed"]
    assert whole.metrics[1]["rollout/partial/resumed"] == whole.metrics[0]["rollout/partial/left"]

    train(*KEEPS, "trainer.total_training_steps=1", "trainer.default_local_dir=halves")
    rest = train(*KEEPS, "trainer.total_training_steps=2", "trainer.default_local_dir=halves")
    for mine, other in zip(rest.batches, whole.batches[1:], strict=True):
        for name, tensor in other.batch.items():
            assert torch.equal(mine.batch[name], tensor), name
        assert mine.non_tensor_batch["uid"].tolist() == other.non_tensor_batch["uid"].tolist()
    assert rest.metrics[-1]["actor/grad_norm"] == whole.metrics[-1]["actor/grad_norm"]


class Source:
    """Prompts a, b, c, ... in batches of three."""

    def __init__(self):
        self.next = 0

    def next_prompts(self) -> DataProto:
        names = [chr(ord("a") + self.next + i) for i in range(3)]
        self.next += 3
        return DataProto.from_dict(non_tensors={"uid": np.array(names, dtype=object)})


class Samplers(Driver):
    """A driver: of each round the named prompts are complete, the others stay in work."""

    def __init__(self, *complete: str):
        super().__init__()
        self.rounds, self.begun, self.done = iter(complete), [], []

    def sample(self, prompts, ctx, follow, enough):
        if not prompts:
            return
        rows = {number: prompt.alone() for number, prompt in prompts.items()}
        uids = {number: one.non_tensor_batch["uid"][0] for number, one in rows.items()}
        states = [one.non_tensor_batch.get("earlier", [None])[0] for one in rows.values()]
        self.begun.append(("".join(uids.values()), [state is None for state in states], enough))
        complete = next(self.rounds)
        for number, one in rows.items():
            one.non_tensor_batch["earlier"] = object_array([[{"turn": 0}, {"turn": 1}]])
            samples = DataProto.from_dict({"responses": torch.zeros(2, 1)}, {"uid": [uids[number]] * 2})
            is_complete = uids[number] in complete
            rows_of = GroupRows.of(samples if is_complete else one)
            self.done.append(Done(number, rows_of, why="" if is_complete else UNFINISHED))

    def ended(self, ctx, wait, may_stop):
        done, self.done = self.done, []
        return done


def test_prompts_in_work_go_first_and_new_ones_take_the_room_that_they_leave():
    settings = {"actor_rollout_ref.rollout.n": 2, "data.train_batch_size": 2}
    run = RunState(replace(PPOTrainerConfig(), **settings), reward=lambda batch: {}, total_steps=9)
    admission = GroupAdmission(2, 2, in_order=False, overdue="reweight", by_batch=True, in_work=4)
    stream, source = GroupStream(admission, run, version=0), Source()
    samplers = Samplers("bd", "acef")
    stream._driver = samplers

    def held(of: GroupStream) -> str:
        return "".join(rows.non_tensor_batch["uid"][0] for rows in of.held_samples())

    stream.prefetch(source, run.open(1), may_stop=False)
    assert samplers.begun == [("abcd", [True] * 4, 2)] and held(stream) == "abcd"
    assert [entry.samples.alone().non_tensor_batch["uid"][0] for entry in stream.queue.take()] == ["b", "d"]
    saved = stream.state()
    stream.prefetch(source, run.open(2), may_stop=False)
    assert samplers.begun[1] == ("acef", [False] * 2 + [True] * 2, 2)
    assert all(entry.is_complete for entry in stream.queue), "a, c, e and f"
    again = GroupStream(admission, run, version=0)
    again.load_state(saved)
    assert held(again) == "ac" and [row.batch.non_tensor_batch["uid"][row.start] for row in again._drawn.left] == [
        "e",
        "f",
    ]
    off = GroupStream(GroupAdmission(2, 2, in_order=False, overdue="reweight", by_batch=True), run, version=0)
    off.load_state(saved)
    assert held(off) == "" and len(off.queue) == 2
    assert "from their prompts again" in notices()["actor_rollout_ref.rollout.keep_unfinished, resumed run"]


@pytest.mark.parametrize(("rate", "count"), [(0.5, 4), (0.25, 3), (0.2, 3), (0.9, 20)])
def test_the_share_that_may_be_left_says_how_many_prompts_are_in_work(rate, count):
    assert prompts_in_work(2, rate) == count


@pytest.mark.parametrize(
    ("changes", "key"),
    [
        ({"actor_rollout_ref.rollout.calculate_log_probs": False}, "calculate_log_probs"),
        ({"algorithm.rollout_correction.bypass_mode": False}, "bypass_mode"),
        ({"algorithm.adv_estimator": "opo"}, "adv_estimator"),
    ],
)
def test_what_cannot_train_on_responses_of_several_versions_is_refused(changes, key):
    usual = {word.partition("=")[0]: word.partition("=")[2] for word in KEEPS[:3]}
    typed = {name: value == "true" if value in ("true", "false") else float(value) for name, value in usual.items()}
    config = replace(PPOTrainerConfig(), **typed)
    assert problems(config) == of_losses(config) == []
    assert not updates_once(config)
    changed = replace(config, **changes)
    (problem,) = problems(changed) + of_losses(changed)
    assert problem.key.endswith(key) and problem.fix


def test_updates_that_interrupt_requests_need_the_samplers_log_probs():
    rollout = "actor_rollout_ref.rollout"
    changes = {f"{rollout}.requests_at_update": "pause", f"{rollout}.calculate_log_probs": False}
    (problem,) = problems(replace(PPOTrainerConfig(), **changes))
    assert isinstance(problem, ConfigError) and "calculate_log_probs=true" in problem.fix
