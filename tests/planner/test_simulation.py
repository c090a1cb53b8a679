"""Schedules on a simulated clock: seconds by arithmetic, the bound of staleness, and what is read of a measured run."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import pytest

from verl.cli.planning import main
from verl.config import PPOTrainerConfig
from verl.config.loading.configuration import read_config
from verl.errors import ConfigError, DataError, NotBuiltError
from verl.journal.file import Journal
from verl.journal.gantt import draw_gantt
from verl.journal.ledger import Ledger
from verl.planner.estimate import Estimate
from verl.planner.from_config import RunPlan
from verl.planner.hardware import Cluster
from verl.planner.layout import Lengths, RolePlan, Workload
from verl.planner.pace import Conversations, MeasuredSteps, Pace, log_normal
from verl.planner.ranges import EFFICIENCY
from verl.planner.seconds import generation
from verl.planner.shapes import ModelShape
from verl.trainer.planning.simulation import SimulatedSchedule, fitted, simulated

PACE = Pace(token=1.0, row=0.5, train=0.25, update=2.0, replicas=1, slots=8)
"""8 requests take 5 s per token: 50 s for 10 tokens; 8 sequences of 15 tokens train for 30 s."""
WORK = Conversations(lengths=(10,), prompt=5)
SEPARATE = ("actor_rollout_ref.hybrid_engine=false", "actor_rollout_ref.rollout.nnodes=1",
            "actor_rollout_ref.rollout.n_gpus_per_node=1",
            "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl")  # fmt: skip
QUEUE = ("async_training.require_batches=1", "async_training.trigger_parameter_sync_step=2", *SEPARATE)
TRAIN, SYNC = 30.0, 2.0
QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 1024, "intermediate_size": 2816,
        "num_hidden_layers": 8, "num_attention_heads": 16, "num_key_value_heads": 4, "vocab_size": 32000,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False}  # fmt: skip


def config(mode: str, *words: str) -> PPOTrainerConfig:
    return read_config("ppo_trainer", [
        f"trainer.v1.trainer_mode={mode}", "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2",
        "actor_rollout_ref.actor.ppo_mini_batch_size=2", "algorithm.adv_estimator=grpo", *words,
    ])  # fmt: skip


def run(mode: str, *words: str, pace: Pace = PACE, work: Conversations = WORK) -> SimulatedSchedule:
    return simulated(config(mode, *words), pace, work, inner=3)


def test_a_step_in_turn_samples_trains_and_syncs():
    result = run("sync")
    assert result.seconds == pytest.approx(
        {"step": 82, "training": TRAIN, "sync": SYNC, "trainer_idle": 50, "sampler_idle": 32}
    )
    assert result.tokens == 4 * 2 * 15
    assert result.occupancy == pytest.approx(50 / 82)
    assert result.staleness == {0: 3 * 8}


@pytest.mark.parametrize(("train", "longer"), [(0.25, 50.0), (0.5, 60.0)])
def test_one_step_off_takes_the_longer_of_sampling_and_training(train, longer):
    result = run("one_step_off", *SEPARATE, pace=replace(PACE, train=train))
    assert result.seconds["step"] == pytest.approx(longer + SYNC)
    assert result.seconds["trainer_idle"] == pytest.approx(longer - train * 120)
    assert result.staleness == {1: 3 * 8}


def test_one_step_off_on_shared_devices_takes_turns():
    result = run("one_step_off")
    assert result.seconds["step"] == pytest.approx(82) and result.staleness == {1: 3 * 8}


@pytest.mark.parametrize("ahead", [1, 2])
def test_full_steps_ahead_are_the_age_of_all_samples(ahead):
    result = run("fully_async", *QUEUE, f"async_training.staleness_threshold={ahead}", pace=replace(PACE, train=0.5))
    assert result.staleness == {ahead: 3 * 8}
    assert result.seconds["step"] == pytest.approx(60 + SYNC), "the next groups are sampled while 60 s are trained"


@pytest.mark.parametrize("ahead", [0.5, 1.5])
@pytest.mark.parametrize("at_update", ["wait", "pause"])
def test_no_sample_is_staler_than_the_bound(ahead, at_update):
    words = (f"async_training.staleness_threshold={ahead}", f"actor_rollout_ref.rollout.requests_at_update={at_update}")
    work = replace(WORK, lengths=log_normal(Lengths(10, 80), 1.0), turns=2, tool=20.0, sigma=1.0)
    result = run("fully_async", *QUEUE, *words, work=work)
    assert 0 < max(result.staleness) <= math.ceil(ahead)
    assert sum(result.staleness.values()) == 3 * 8


def test_a_straggler_delays_the_batch():
    result = run("sync", pace=replace(PACE, replicas=2, straggler=3.0))
    assert result.seconds["trainer_idle"] == pytest.approx(10 * 3 * 3), "4 requests each: 3 s per token, and 9 s"
    assert result.seconds["sampler_idle"] == pytest.approx(90 + TRAIN + SYNC - (90 + 30) / 2)


def test_requests_beyond_the_slots_wait_for_the_first_ones():
    result = run("sync", pace=replace(PACE, slots=4))
    assert result.seconds["trainer_idle"] == pytest.approx(2 * 10 * 3)
    assert result.occupancy == pytest.approx(60 / 92)


def test_conversations_wait_for_their_tools():
    result = run("sync", work=replace(WORK, turns=2, tool=7.0))
    assert result.seconds["trainer_idle"] == pytest.approx(50 + 2 * 7)
    assert result.seconds["sampler_idle"] == pytest.approx(2 * 7 + TRAIN + SYNC)


def test_equal_seeds_draw_equal_runs_and_others_do_not():
    work = replace(WORK, lengths=log_normal(Lengths(10, 80), 1.0))
    once, again, other = (run("sync", work=replace(work, seed=seed)) for seed in (1, 1, 2))
    assert once == again and once.seconds["step"] != other.seconds["step"]


def test_the_inner_steps_are_a_gantt_chart():
    result = run("one_step_off", *SEPARATE)
    assert {span.step for span in result.spans if span.stage == "step"} == {3, 4, 5}
    picture = draw_gantt(result.spans, "simulated")
    assert picture.count("update_actor, 30.000 s") == 3 and picture.count("gen, 50.000 s") == 3 * 4


FILTERING = "algorithm.filter_groups.enable=true"


def test_dynamic_sampling_samples_batches_until_groups_with_signal_fill_one():
    """A batch of prompts takes 50 s, whatever comes of it; what is left over opens the next step."""
    work = replace(WORK, filtered=0.5)
    kept = [not work.is_filtered(group) for group in range(400)]
    assert 0.4 < sum(kept) / 400 < 0.6
    batches, with_signal, trained = [0], 0, 0  # prompts come four at a time
    while len(batches) <= 7:
        trained += 4
        while with_signal < trained:
            with_signal += sum(kept[4 * batches[-1] : 4 * batches[-1] + 4])
            batches[-1] += 1
        batches.append(batches[-1])
    result = run("sync", FILTERING, work=work)
    assert result.seconds["trainer_idle"] == pytest.approx(50 * (batches[3] - batches[0]) / 3)
    assert result.tokens == 4 * 2 * 15 and result.staleness.keys() <= {0, 1}
    lost = sum(not one for one in kept[: 4 * batches[4]]) / (4 * batches[4])
    assert result.filtered == pytest.approx(lost)


def test_groups_without_signal_make_room_for_others_while_training():
    work = replace(WORK, filtered=0.5)
    result = run("fully_async", *QUEUE, FILTERING, "async_training.staleness_threshold=1", work=work)
    none = run("fully_async", *QUEUE, "async_training.staleness_threshold=1")
    assert result.tokens == none.tokens and result.filtered > 0.2 and none.filtered == 0
    assert result.seconds["step"] > none.seconds["step"]


def test_a_share_of_filtered_groups_needs_dynamic_sampling():
    with pytest.raises(ConfigError, match="--filtered"):
        run("sync", work=replace(WORK, filtered=0.5))


@pytest.mark.parametrize(("mode", "more"), [("sync", ()), ("one_step_off", SEPARATE), ("separate_async", SEPARATE)])
def test_greedy_responses_follow_the_samples_and_take_turns_with_training(mode: str, more: tuple[str, ...]):
    """8 samples take 50 s; then 4 greedy responses, 3 s per token."""
    result = run(mode, "algorithm.adv_estimator=remax", *more)
    assert result.tokens == 4 * 2 * 15, "nothing is trained on greedy responses"
    passes = [span.end - span.begin for span in result.spans if span.stage == "gen_max"]
    assert passes == pytest.approx([30.0] * len(passes)) and len(passes) >= 3
    if mode == "sync":
        assert result.seconds["trainer_idle"] == pytest.approx(50 + 30)


@pytest.mark.parametrize("word", ["data.oversample_factor=2",
                                  "actor_rollout_ref.rollout.over_sample_rate=0.1"])  # fmt: skip
def test_settings_without_a_simulation_are_refused(word):
    with pytest.raises(NotBuiltError, match=word.partition("=")[0]):
        run("sync", word)


# ---- what a simulation reads -----------------------------------------------------------------------------------


def test_log_normal_lengths_have_the_mean_of_the_run():
    lengths = log_normal(Lengths(512, 1024), 0.7)
    assert sum(lengths) / len(lengths) == pytest.approx(512, abs=0.5)
    assert max(lengths) == 1024 and lengths[len(lengths) // 2] < 512, "the tail is long"
    assert set(log_normal(Lengths(512, 1024), 0.0)) == {512}


@pytest.mark.parametrize("sampler", ["hf", "vllm"])
def test_a_full_replica_takes_the_seconds_of_the_estimate(sampler):
    shape, work = ModelShape.from_config(QWEN), Workload(16, 4, Lengths(64, 128), Lengths(256, 512))
    roles = (RolePlan("actor", "plain", trains=True, micro_tokens=4096, infer_tokens=4096),
             RolePlan("rollout", sampler, memory_fraction=0.5, batch_rows=64))  # fmt: skip
    cluster = Cluster.parse("H100")
    pace = Pace.of(Estimate.of(RunPlan(roles, {role.role: shape for role in roles}, work), cluster))
    full = generation(roles[1], shape, replace(work, response=Lengths(256, 256)), cluster).likely
    assert 256 * (pace.token + pace.row * 64) == pytest.approx(full)
    assert pace.slots == 64 and pace.token > 0 < pace.row and pace.train > 0 < pace.update


def journal(folder: Path, *stages: tuple[str, int, float, float]) -> Path:
    folder.mkdir(exist_ok=True)
    entries = Journal(folder)
    ledger = Ledger(entries)
    entries.begin([ledger])
    for stage, step, begin, end in stages:
        entries.write({"event": "span", "stage": stage, "step": step, "thread": "main", "begin": begin, "end": end})
    for step, tokens in ((1, 7), (2, 9)):
        ledger.requested(step, 0, [(f"prompt {step}", 0)])
        ledger.noted("sampled", step, [(f"prompt {step}", 0)], tokens=[tokens])
    entries.close()
    return folder


TURNS = (("step", 1, 0, 100), ("step", 2, 100, 130), ("gen", 2, 100, 110), ("reward", 2, 110, 112),
         ("update_actor", 2, 112, 120), ("save_checkpoint", 2, 120, 125), ("update_weights", 2, 125, 128))  # fmt: skip


def test_a_run_in_turn_says_its_seconds_and_lengths(tmp_path):
    steps = MeasuredSteps.of(journal(tmp_path, *TURNS))
    assert steps == MeasuredSteps(sampling=12, training=30 - 12 - 5 - 3, update=3, lengths=(7, 9))


def test_a_run_that_overlapped_is_refused(tmp_path):
    with pytest.raises(DataError, match=r"trainer_mode=sync"):
        MeasuredSteps.of(journal(tmp_path, *TURNS, ("wait_for_samples", 2, 112, 113)))


def test_a_fit_gives_the_seconds_of_the_run():
    work, sync = replace(WORK, turns=2, tool=7.0), config("sync")
    steps = MeasuredSteps(sampling=100.0, training=40.0, update=3.0, lengths=(10,))
    result = simulated(sync, fitted(sync, PACE, work, 3, steps), work, 3).seconds
    assert result["trainer_idle"] == pytest.approx(100, rel=0.003) and result["step"] == pytest.approx(143, rel=0.003)
    with pytest.raises(ConfigError, match="14 s in waits alone"):
        fitted(sync, PACE, work, 3, replace(steps, sampling=13.0))


# ---- the command -----------------------------------------------------------------------------------------------


@pytest.fixture
def words(tmp_path) -> list[str]:
    (tmp_path / "config.json").write_text(json.dumps(QWEN))
    return ["simulate", "--devices=2xH100", "--steps=2", f"actor_rollout_ref.model.path={tmp_path}",
            "data.train_batch_size=4", "actor_rollout_ref.rollout.n=2", "actor_rollout_ref.actor.ppo_mini_batch_size=2",
            "algorithm.adv_estimator=grpo", "actor_rollout_ref.rollout.name=vllm", "trainer.save_freq=5",
            *SEPARATE]  # fmt: skip


def test_the_command_compares_schedules(words, tmp_path, capsys):
    picture = tmp_path / "step.svg"
    assert main([*words, "--schedules=one_step_off", f"--gantt={picture}"]) == 0
    printed = capsys.readouterr().out
    assert "one_step_off" in printed and "ideal overlap" in printed and "1: 100%" in printed
    assert "update_weights" in picture.read_text()


def test_the_command_takes_seconds_and_lengths_of_a_run(words, tmp_path, capsys):
    assert main([*words, "--json", f"--from={journal(tmp_path / 'run', *TURNS)}"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    assert row["seconds"]["trainer_idle"] == pytest.approx(12, rel=0.003)
    assert row["seconds"]["sync"] == pytest.approx(3)
    assert row["seconds"]["training"] == pytest.approx(10, rel=0.01), "prompts of 256 tokens, responses of 7 and 9"
    assert 4 * 2 * (256 + 7) <= row["tokens"] <= 4 * 2 * (256 + 9)


def test_schedules_train_longer_where_they_compute_old_log_probs(words, tmp_path, capsys):
    """One update on policy needs none under `sync`; the pass adds a third to the operations at equal shares."""
    words = [*words, "actor_rollout_ref.actor.ppo_mini_batch_size=4", "--schedules=one_step_off", "--json"]
    run = f"--from={journal(tmp_path / 'run', *TURNS)}"
    ratios = []
    for more in ([], [run]):
        assert main([*words, *more]) == 0
        sync, ahead = json.loads(capsys.readouterr().out)
        ratios.append((ahead["seconds"]["training"] / ahead["tokens"]) / (sync["seconds"]["training"] / sync["tokens"]))
    # Without recomputation an update is three passes; with it, as here, four.
    infer, train = (EFFICIENCY[name].likely for name in ("infer", "train"))
    assert ratios == pytest.approx([1 + train / infer / 4] * 2)


def test_a_simulation_says_what_does_not_fit(words, capsys):
    words = [*words, "--schedules=one_step_off", "--devices=1xH100"]
    assert main(words) == 0
    assert capsys.readouterr().out.count("does not fit: ") == 1
    assert main([*words, "--json"]) == 0
    for row in json.loads(capsys.readouterr().out):
        (problem,) = row["problems"]
        assert "more processes than there are devices" in problem


def test_failures_cost_what_a_poisson_process_says(words, capsys):
    assert main([*words, "--json"]) == 0
    (row,) = json.loads(capsys.readouterr().out)
    interval = 5 * row["seconds"]["step"]
    hours = 2 * interval / 3600  # of one device; the pair fails once per interval
    assert main([*words, "--json", f"--mtbf={hours}"]) == 0
    (failures,) = json.loads(capsys.readouterr().out)
    assert failures["lost"] == pytest.approx(1 - 1 / (math.e - 1))
    assert failures["seconds"] == row["seconds"] and row["lost"] == 0


@pytest.mark.parametrize(("more", "message"), [
    (["--schedules=one_step_of"], "trainer.v1.trainer_mode"),
    (["--from={folder}"], "there is no journal"),
    (["--mtbf=1000", "trainer.save_freq=-1"], "trainer.save_freq"),
    (["algorithm.filter_groups.enable=true"], "--filtered"),
    (["actor_rollout_ref.rollout.name=sglang_of_another_kind"], "actor_rollout_ref.rollout.name"),
])  # fmt: skip
def test_what_cannot_be_simulated_is_named(words, more, message, tmp_path, capsys):
    assert main([*words, *(word.format(folder=tmp_path) for word in more)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    "word", ["--mtbf=0", "--mtbf=-3", "--straggler=0.5", "--turns=0", "--mtbf=nan", "--filtered=1"]
)
def test_numbers_out_of_range_are_refused(words, word, capsys):
    with pytest.raises(SystemExit) as end:
        main([*words, word])
    assert end.value.code == 2 and "allowed: a number" in capsys.readouterr().err
