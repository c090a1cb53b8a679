"""Plans of real shapes: they keep to divisibility and memory, their overrides resolve, and the table says why."""

from __future__ import annotations

import json
import shlex

import pytest

from verl.cli.planning import main
from verl.cli.proposing import rules_of
from verl.config.loading.configuration import read_config
from verl.config.machine.topology import Topology
from verl.config.rules import validate
from verl.errors import ConfigError
from verl.planner.choices import role_choices, space_of
from verl.planner.hardware import Cluster
from verl.planner.layout import Lengths, RolePlan, Workload
from verl.planner.proposal import overrides, proposal, step_chart
from verl.planner.search import PlacementSearch
from verl.planner.shapes import ModelShape
from verl.planner.space import NoPlacement, PlacementPlan, PlacementRules, PoolPlan, RoleCost

QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False}  # fmt: skip
WORK = Workload(256, 4, Lengths(256, 512), Lengths(512, 1024))
SHAPE = ModelShape.from_config(QWEN)
GRPO, PPO = ("actor", "rollout", "ref"), ("actor", "rollout", "ref", "critic")


def roles_of(names, engine):
    return [RolePlan(name, "vllm" if name == "rollout" else engine, trains=name in ("actor", "critic"),
                     scalar_head=name == "critic", mini_batches=4 if name in ("actor", "critic") else 1,
                     memory_fraction=0.6 if name == "rollout" else 0.0, fused_head="torch",
                     pool="pool") for name in names]  # fmt: skip


def best_of(names, engine, devices, rules=None):
    cluster = Cluster.parse(devices)
    space = space_of(roles_of(names, engine), dict.fromkeys(names, SHAPE), WORK, cluster, rules)
    return PlacementSearch(space).best(0.01), cluster


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_every_choice_divides_the_devices_the_heads_and_the_batch(engine):
    choices = list(role_choices(roles_of(["actor"], engine)[0], SHAPE, WORK, 8, 16))
    assert choices
    for choice in choices:
        sizes = choice.parallel
        assert sizes.devices == choice.devices == 16
        assert 28 % (sizes.tensor * sizes.sequence) == 0 and 28 % sizes.pipeline == 0
        assert (256 * 4 // 4) % sizes.data == 0
    assert list(role_choices(roles_of(["actor"], engine)[0], SHAPE, WORK, 8, 9)) == []


@pytest.mark.parametrize(
    ("names", "engine", "devices", "rules"),
    [
        (GRPO, "fsdp2", "8xH100", None),
        (PPO, "megatron", "32xH100", None),
        (PPO, "fsdp2", "16xH100", PlacementRules(separate=(frozenset({"actor", "critic"}),), schedules=("sync",))),
        (GRPO, "fsdp2", "16xH100", PlacementRules(schedules=("async",))),
    ],
)
def test_overrides_of_a_plan_resolve_to_its_placement(names, engine, devices, rules):
    plan, cluster = best_of(names, engine, devices, rules)
    assert all(pool.bytes <= cluster.device.memory for pool in plan.pools)
    words = ["algorithm.adv_estimator=" + ("gae" if "critic" in names else "grpo"), "data.train_batch_size=256",
             "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=4",
             "actor_rollout_ref.actor.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=64",
             "actor_rollout_ref.actor.use_kl_loss=true"]  # fmt: skip
    base = "ppo_megatron_trainer" if engine == "megatron" else "ppo_trainer"
    config = read_config(base, [*words, *overrides(plan, cluster)])
    validate.check_printed(config)  # as --cfg job does
    topology = Topology.of(config)
    for pool in plan.pools:
        for role, choice in pool.choices.items():
            assert topology.pool_of(role).size == pool.devices
            if role == "rollout":
                assert topology.spec.tensor == choice.parallel.tensor
                assert len(topology.replicas) == choice.parallel.data
                continue
            sizes, parallel = topology.part(role).sizes, choice.parallel
            assert (sizes.data, sizes.tensor, sizes.pipeline, sizes.sequence) == (
                parallel.data, parallel.tensor, parallel.pipeline, parallel.sequence)  # fmt: skip


def test_the_text_has_the_table_the_others_and_what_to_paste():
    text = proposal(roles_of(GRPO, "fsdp2"), dict.fromkeys(GRPO, SHAPE), WORK, Cluster.parse("8xH100"))
    assert "No placement takes less than" in text and "the configuration itself" in text
    assert "trainer.n_gpus_per_node=8" in shlex.split(text.split("\n\n")[-1].replace("\\\n", " "))


def test_the_chart_has_the_stages_of_a_pool_one_after_the_other():
    policy = PoolPlan(2, {"actor": None}, {"actor": RoleCost(preparation=10, training=20)})
    sampler = PoolPlan(1, {"rollout": None}, {"rollout": RoleCost(generation=30)})
    sync = step_chart(PlacementPlan("sync", (policy, sampler)), width=60).splitlines()
    assert sync[0].split("|")[1] == " " * 30 + "P" * 10 + "T" * 20
    assert sync[1].split("|")[1] == "G" * 30 + " " * 30
    ahead = step_chart(PlacementPlan("async", (policy, sampler)), width=60).splitlines()
    assert [line.split("|")[1] for line in ahead[:2]] == ["P" * 20 + "T" * 40, "G" * 60]


def test_a_model_too_large_for_its_devices_gets_the_number_that_fits():
    with pytest.raises(NoPlacement, match=r"GiB more than one has.*The cheapest change that helps: [0-9]+ devices"):
        proposal(roles_of(GRPO, "fsdp2"), dict.fromkeys(GRPO, SHAPE), WORK, Cluster.parse("1xL40S"))


def test_another_method_is_refused():
    with pytest.raises(ConfigError, match=r"--method.*exact, paper"):
        proposal(roles_of(GRPO, "fsdp2"), dict.fromkeys(GRPO, SHAPE), WORK, Cluster.parse("8xH100"), method="guess")


def test_the_command_reads_its_rules():
    flags = {"--together": ["actor,ref"], "--separate": ["actor,critic,rm"], "--pool": ["critic:8"],
             "--schedule": ["sync"]}  # fmt: skip
    rules = rules_of(flags)
    assert rules.together == (frozenset({"actor", "ref"}),)
    assert set(rules.separate) == {frozenset(pair) for pair in [("actor", "critic"), ("actor", "rm"), ("critic", "rm")]}
    assert rules.devices == {"critic": 8} and rules.schedules == ("sync",)


@pytest.mark.parametrize(
    ("flag", "value"), [("--together", "actor"), ("--pool", "critic"), ("--pool", "critic:x"), ("--schedule", "later")]
)
def test_a_rule_that_says_nothing_is_refused_with_an_example(flag, value):
    flags = {"--together": [], "--separate": [], "--pool": [], "--schedule": [], flag: [value]}
    with pytest.raises(ConfigError, match=f"{flag}.*{value}.*Allowed"):
        rules_of(flags)


def test_the_command_prints_a_plan_for_the_words_of_a_run(tmp_path, capsys):
    (tmp_path / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    words = ["plan", "--devices", "8xH100", "--schedule=sync", "algorithm.adv_estimator=grpo"]
    words += [
        f"actor_rollout_ref.model.path={tmp_path}",
        *(f"actor_rollout_ref.rollout.{w}" for w in ("name=vllm", "n=8")),
    ]
    assert main(words) == 0
    assert "rollout+actor on 8 (sync)" in capsys.readouterr().out
    assert main([*words, "--pool=actor:11"]) == 2
    assert "a pool of actor cannot have this number of devices" in capsys.readouterr().err
