"""Plans of real shapes: they keep to divisibility and memory, and their overrides give the roles that were costed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl.cli.planning import main, step_text
from verl.config.loading.configuration import read_config
from verl.config.rules import validate
from verl.models.shape import model_shape
from verl.planner.choices import role_choices, role_cost
from verl.planner.estimate import USABLE, Estimate
from verl.planner.from_config import RunPlan, run_plan
from verl.planner.hardware import Cluster
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.memory import memory_of
from verl.planner.proposal import Proposal, overrides, proposal
from verl.planner.shapes import ModelShape
from verl.planner.space import NoPlacement, PlacementPlan, PlacementRules, PoolPlan, RoleCost

QWEN = {"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "vocab_size": 152064,
        "rms_norm_eps": 1e-6, "tie_word_embeddings": False}  # fmt: skip
QWEN3 = QWEN | {"architectures": ["Qwen3ForCausalLM"], "model_type": "qwen3", "head_dim": 128}
SMALL = QWEN | {"hidden_size": 1792, "intermediate_size": 4864, "num_attention_heads": 14, "num_key_value_heads": 2}
WORK = Workload(256, 4, Lengths(256, 512), Lengths(512, 1024))
SHAPE = ModelShape.from_config(QWEN)
NODE = Cluster.parse("8xH100")
GRPO, PPO = ("actor", "rollout", "ref"), ("actor", "rollout", "ref", "critic")
BOTH = ("actor_rollout_ref.actor", "critic")
SPLIT = PlacementRules(separate=(frozenset({"actor", "critic"}),), schedules=("sync",))
ASYNC = PlacementRules(schedules=("async",))
CASES = {
    "fsdp2": (QWEN, GRPO, "8xH100", None, []),
    "megatron": (QWEN, PPO, "32xH100", None, []),
    "megatron with recomputation": (
        QWEN, GRPO, "8xH100", None,
        ["actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full"],
    ),
    "two pools": (QWEN, PPO, "16xH100", SPLIT, []),
    "a pool of samplers": (QWEN, GRPO, "16xH100", ASYNC, []),
    "fsdp2 with shards over two": (
        QWEN, GRPO, "8xH100", None,
        ["trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
         "actor_rollout_ref.actor.fsdp_config.offload_policy=true"],
    ),
    "fsdp2 by name, on one device": (
        SMALL, GRPO, "1xH200", None, [f"{section}.strategy=fsdp2" for section in BOTH],
    ),
    "fsdp2 by name, then two devices": (SMALL, GRPO, "2xH200", None, ["actor_rollout_ref.actor.strategy=plain"]),
    "a batch ahead, then in turn": (
        QWEN, GRPO, "8xH100", PlacementRules(schedules=("sync",)),
        ["trainer.v1.trainer_mode=one_step_off", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
         "+trainer.resource_pools.samplers={roles: [rollout], processes: [1]}"],
    ),
    "pools of other names": (
        QWEN, PPO, "16xH100", SPLIT, ["+trainer.resource_pools.values={roles: [critic], processes: [2]}"],
    ),
    "torchtitan": (QWEN3, GRPO, "8xH100", None, ["actor_rollout_ref.actor.strategy=torchtitan"]),
}  # fmt: skip


def roles_of(names: tuple[str, ...], engine: str) -> list[RolePlan]:
    return [RolePlan(name, "vllm" if name == "rollout" else engine, trains=name in ("actor", "critic"),
                     scalar_head=name == "critic", mini_batches=4 if name in ("actor", "critic") else 1,
                     memory_fraction=0.6 if name == "rollout" else 0.0, fused_head="torch",
                     pool="pool") for name in names]  # fmt: skip


@pytest.mark.parametrize("engine", ["fsdp2", "megatron"])
def test_every_choice_divides_the_devices_the_heads_and_the_batch(engine):
    (actor,) = roles_of(("actor",), engine)
    choices = list(role_choices(actor, SHAPE, WORK, NODE, 16))
    assert choices
    for choice in choices:
        sizes = choice.parallel
        assert sizes.devices == choice.devices == 16
        assert 28 % (sizes.tensor * sizes.sequence) == 0 and 28 % sizes.pipeline == 0
        assert (256 * 4 // 4) % sizes.data == 0
    assert list(role_choices(actor, SHAPE, WORK, NODE, 9)) == []


def test_experts_are_shared_by_the_ranks_beside_the_tensor_size():
    """Eight shares of experts, each as wide as the tensor size, take 8 t of the ranks of a pipeline stage."""
    actor = replace(roles_of(("actor",), "megatron")[0], parallel=Parallel(expert=8))
    sizes = [choice.parallel for choice in role_choices(actor, SHAPE, WORK, NODE, 16)]
    assert {(parallel.tensor, parallel.pipeline, parallel.data, parallel.expert) for parallel in sizes} == {
        (1, 1, 16, 8), (1, 2, 8, 8), (2, 1, 8, 8)}  # fmt: skip
    on_fsdp = replace(actor, engine="fsdp2")
    assert list(role_choices(on_fsdp, SHAPE, WORK, NODE, 4)) == []
    assert {choice.parallel.expert for choice in role_choices(on_fsdp, SHAPE, WORK, NODE, 8)} == {8}


def test_no_sampler_lacks_room_for_one_sequence():
    """A fifth of a device is less than weights and graphs of a copy on one, and more than those of a quarter."""
    (sampler,) = roles_of(("rollout",), "fsdp2")
    choices = list(role_choices(replace(sampler, memory_fraction=0.2), SHAPE, WORK, NODE, 8))
    shares = {(choice.parallel.tensor, choice.memory_fraction) for choice in choices}
    assert (1, 0.2) not in shares and {(1, 0.5), (4, 0.2)} <= shares
    assert all(memory_of(choice, SHAPE, WORK, NODE.device).phase("generate").kv_cache > 0 for choice in choices)
    with pytest.raises(NoPlacement, match=r"rollout: .*KV cache of one sequence"):
        proposal(RunPlan((sampler,), {"rollout": SHAPE}, WORK), Cluster(replace(NODE.device, memory=16e9), 1))


def planned(folder: Path, case: str) -> tuple[list[str], str]:
    """Base configuration and words of a case, whose model is in the folder."""
    model, names, _, _, changes = CASES[case]
    folder.joinpath("config.json").write_text(json.dumps(model), encoding="utf-8")
    words = ["algorithm.adv_estimator=" + ("gae" if "critic" in names else "grpo"), "data.train_batch_size=256",
             f"actor_rollout_ref.model.path={folder}", f"critic.model.path={folder}",
             "actor_rollout_ref.rollout.name=vllm", "actor_rollout_ref.rollout.n=4",
             "actor_rollout_ref.actor.ppo_mini_batch_size=64", "critic.ppo_mini_batch_size=64",
             "actor_rollout_ref.actor.use_kl_loss=true"]  # fmt: skip
    return [*words, *changes], "ppo_megatron_trainer" if "megatron" in case else "ppo_trainer"


@pytest.mark.parametrize("case", CASES)
def test_overrides_of_a_plan_give_the_roles_that_were_costed(case, tmp_path):
    _, _, devices, rules, _ = CASES[case]
    words, base = planned(tmp_path, case)
    cluster = Cluster.parse(devices)
    answer = proposal(run_plan(read_config(base, words), False, model_shape), cluster, rules, gap=0.01)
    plan = answer.plan
    config = read_config(base, [*words, *overrides(plan, cluster, answer.replaces_pools)])
    validate.check_printed(config)  # as --cfg job does
    run = run_plan(config, False, model_shape)
    choices = {role: choice for pool in plan.pools for role, choice in pool.choices.items()}
    roles = {role.role: replace(role, pool=choices[role.role].pool) for role in run.roles}
    assert roles == choices
    assert config.trainer.v1.trainer_mode == {"sync": "sync", "async": "one_step_off"}[plan.schedule]
    assert len(config.trainer.resource_pools) == len(plan.pools) - 1
    assert Estimate.of(run, cluster).problems() == []
    assert all(pool.bytes <= USABLE * cluster.device.memory for pool in plan.pools)


def test_a_model_too_large_for_its_devices_is_refused_with_its_needs():
    run = RunPlan(tuple(roles_of(("actor", "ref"), "fsdp2")), dict.fromkeys(GRPO, SHAPE), WORK)
    with pytest.raises(NoPlacement, match=r"actor [0-9.]+ GiB on each of 1, ref [0-9.]+ GiB on each of 1"):
        proposal(run, Cluster.parse("1xL40S"))


def test_a_plan_fills_no_more_of_a_device_than_a_check_admits():
    (actor,) = roles_of(("actor",), "fsdp2")
    run, single = RunPlan((actor,), {"actor": SHAPE}, WORK), replace(NODE, devices=1)
    costs = [role_cost(choice, SHAPE, WORK, single) for choice in role_choices(actor, SHAPE, WORK, single, 1)]
    least = min(cost.resident + cost.working for cost in costs) / USABLE
    assert proposal(run, Cluster(replace(NODE.device, memory=1.001 * least), 1)).plan.devices == 1
    with pytest.raises(NoPlacement):
        proposal(run, Cluster(replace(NODE.device, memory=0.999 * least), 1))


def test_free_devices_are_useless_only_where_the_plan_is_optimal():
    pool = PoolPlan(4, {"actor": None}, {"actor": RoleCost(training=10)})
    for bound, proved in ((10, True), (9, False)):
        text = step_text(Proposal(NODE, PlacementPlan("sync", (pool,), bound), ()))
        assert "4 of 8 devices stay free" in text and ("on more devices is faster" in text) is proved


@pytest.fixture
def words(tmp_path) -> list[str]:
    """A command line of ``plan``."""
    (tmp_path / "config.json").write_text(json.dumps(QWEN), encoding="utf-8")
    return ["plan", "--devices", "8xH100", "--schedule=sync", "algorithm.adv_estimator=grpo",
            f"actor_rollout_ref.model.path={tmp_path}", "actor_rollout_ref.rollout.name=vllm",
            "actor_rollout_ref.rollout.n=8"]  # fmt: skip


def test_the_command_prints_a_placement_others_and_overrides(words, capsys):
    assert main(words) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "rollout+actor on 8 (sync)" in printed and "No placement takes less than" in printed
    assert "the configuration itself" in printed and "trainer.n_gpus_per_node=8" in printed
    assert main([*words, "--pool=actor:5"]) == 2
    assert "a pool of actor cannot have this number of devices" in capsys.readouterr().err


def test_a_plan_of_another_schedule_is_refused_by_its_name(words, capsys):
    modes = ["trainer.v1.trainer_mode=colocate_async"]
    assert main([*words, *modes]) == 2
    message = capsys.readouterr().err
    assert "trainer.v1.trainer_mode" in message and "colocate_async" in message and "one_step_off" in message


def test_a_plan_is_an_object_in_json(words, capsys):
    assert main([*words, "--json", "--pool=actor:4", "--together=actor,rollout"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (pool,) = answer["pools"]
    assert pool["devices"] == 4 and set(pool["roles"]) == {"actor", "rollout"} == set(pool["costs"])
    assert answer["schedule"] == "sync" and "trainer.n_gpus_per_node=4" in answer["overrides"]
    assert answer["bound"] == answer["seconds"] == pytest.approx(sum(answer["stages"].values()))
    assert answer["others"]["the configuration itself"] > answer["seconds"]


def test_roles_of_a_rule_are_separated_pair_by_pair(words, capsys):
    three = ["--separate=actor,rollout,ref", "actor_rollout_ref.actor.use_kl_loss=true"]
    assert main([*words, *three, "--json"]) == 0
    assert [len(pool["roles"]) for pool in json.loads(capsys.readouterr().out)["pools"]] == [1, 1, 1]


@pytest.mark.parametrize(
    ("flag", "value"),
    [("--together", "actor"), ("--pool", "critic"), ("--pool", "critic:x"), ("--schedule", "later"), ("--gap", "1")],
)
def test_a_rule_without_sense_is_refused_with_what_is_allowed(words, capsys, flag, value):
    with pytest.raises(SystemExit) as exit_status:
        main([*words, f"{flag}={value}"])
    assert exit_status.value.code == 2
    message = capsys.readouterr().err.splitlines()[-1]
    assert flag in message and value in message and ("allowed" in message or "choose from" in message)
