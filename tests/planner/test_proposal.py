"""Plans of real shapes: they keep to divisibility and memory, and their overrides give the roles that were costed."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from verl.cli.planning import main, step_text
from verl.config.loading.configuration import read_config
from verl.config.rules import validate
from verl.errors import ConfigError
from verl.models.shape import model_shape
from verl.planner.choices import role_choices, role_cost
from verl.planner.estimate import USABLE, Estimate
from verl.planner.from_config import RunPlan, run_plan
from verl.planner.hardware import Cluster
from verl.planner.layout import Lengths, Parallel, RolePlan, Workload
from verl.planner.memory import memory_of
from verl.planner.proposal import Proposal, overrides, proposal
from verl.planner.ranges import EFFICIENCY
from verl.planner.shapes import ModelShape
from verl.planner.space import NoPlacement, PlacementPlan, PoolPlan, RoleCost

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
ANY, SYNC, ASYNC = ("sync", "async"), ("sync",), ("async",)
CASES = {
    "fsdp2": (QWEN, GRPO, "8xH100", ANY, []),
    "megatron": (QWEN, PPO, "32xH100", ANY, []),
    "megatron with recomputation": (
        QWEN, GRPO, "8xH100", ANY,
        ["actor_rollout_ref.actor.megatron.override_transformer_config.recompute_granularity=full"],
    ),
    "two pools": (QWEN, PPO, "16xH100", SYNC, []),
    "a pool of samplers": (QWEN, GRPO, "16xH100", ASYNC, []),
    "fsdp2 with shards over two": (
        QWEN, GRPO, "8xH100", ANY,
        ["trainer.n_gpus_per_node=8", "actor_rollout_ref.actor.fsdp_config.fsdp_size=2",
         "actor_rollout_ref.actor.fsdp_config.offload_policy=true"],
    ),
    "fsdp2 by name, on one device": (
        SMALL, GRPO, "1xH200", ANY, [f"{section}.strategy=fsdp2" for section in BOTH],
    ),
    "fsdp2 by name, then two devices": (SMALL, GRPO, "2xH200", ANY, ["actor_rollout_ref.actor.strategy=plain"]),
    "a batch ahead, then in turn": (
        QWEN, GRPO, "8xH100", SYNC,
        ["trainer.v1.trainer_mode=one_step_off", "actor_rollout_ref.rollout.checkpoint_engine.backend=nccl",
         "+trainer.resource_pools.samplers={roles: [rollout], processes: [1]}"],
    ),
    "pools of other names": (
        QWEN, PPO, "16xH100", SYNC, ["+trainer.resource_pools.values={roles: [critic], processes: [2]}"],
    ),
    "torchtitan": (QWEN3, GRPO, "8xH100", ANY, ["actor_rollout_ref.actor.strategy=torchtitan"]),
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
    _, _, devices, schedules, _ = CASES[case]
    words, base = planned(tmp_path, case)
    cluster = Cluster.parse(devices)
    answer = proposal(run_plan(read_config(base, words), False, model_shape), cluster, schedules)
    plan = answer.plan
    if "pools" in case:  # a slower one, of several
        plan = next(other for _, other in answer.others[:-1] if len(other.pools) > 1)
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
    with pytest.raises(NoPlacement, match=r"actor [0-9.]+ GB on each of 1, ref [0-9.]+ GB on each of 1"):
        proposal(run, Cluster.parse("1xL40S"))


def test_an_asynchronous_plan_needs_a_sampler():
    run = RunPlan(tuple(roles_of(("actor",), "fsdp2")), {"actor": SHAPE}, WORK)
    with pytest.raises(ConfigError, match=r"needs a sampler.*Allowed: sync"):
        proposal(run, NODE, ("async",))


def test_a_plan_fills_no_more_of_a_device_than_a_check_admits():
    (actor,) = roles_of(("actor",), "fsdp2")
    run, single = RunPlan((actor,), {"actor": SHAPE}, WORK), replace(NODE, devices=1)
    costs = [role_cost(choice, SHAPE, WORK, single) for choice in role_choices(actor, SHAPE, WORK, single, 1)]
    least = min(cost.resident + cost.working for cost in costs) / USABLE
    assert proposal(run, Cluster(replace(NODE.device, memory=1.001 * least), 1)).plan.devices == 1
    with pytest.raises(NoPlacement):
        proposal(run, Cluster(replace(NODE.device, memory=0.999 * least), 1))


def test_a_plan_is_printed_in_the_gigabytes_of_an_estimate():
    pool = PoolPlan(4, {"actor": None}, {"actor": RoleCost(training=10, resident=20e9)})
    text = step_text(Proposal(NODE, PlacementPlan("sync", (pool,)), ()))
    assert "4 of 8 devices stay free" in text and "20.0 GB each, at most 75.2" in text


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
    assert "rollout+actor on 8 (sync)" in printed and "No placement takes less" in printed
    assert "the configuration itself" in printed and "trainer.n_gpus_per_node=8" in printed


def test_a_plan_of_another_schedule_is_refused_by_its_name(words, capsys):
    modes = ["trainer.v1.trainer_mode=colocate_async"]
    assert main([*words, *modes]) == 2
    message = capsys.readouterr().err
    assert "trainer.v1.trainer_mode" in message and "colocate_async" in message and "one_step_off" in message


def test_a_plan_is_an_object_in_json(words, capsys):
    assert main([*words, "--json"]) == 0
    answer = json.loads(capsys.readouterr().out)
    (pool,) = answer["pools"]
    assert pool["devices"] == 8 and set(pool["roles"]) == {"actor", "rollout"} == set(pool["costs"])
    assert answer["schedule"] == "sync" and "trainer.n_gpus_per_node=8" in answer["overrides"]
    assert answer["seconds"] == pytest.approx(sum(answer["stages"].values()))
    assert answer["others"]["the configuration itself"] > answer["seconds"]


def test_a_plan_counts_old_log_probs_where_an_admitted_schedule_computes_them(words, capsys):
    batch = ["--json", "data.train_batch_size=64", "actor_rollout_ref.actor.ppo_mini_batch_size=64"]
    seconds = []
    for line in (words, [word for word in words if word != "--schedule=sync"]):
        assert main([*line, *batch]) == 0
        pools = json.loads(capsys.readouterr().out)["pools"]
        seconds += [pool["costs"]["actor"]["preparation"] for pool in pools if "actor" in pool["costs"]]
    assert seconds[0] == 0 < seconds[1]


def test_plan_and_estimate_bill_a_weight_sync_alike():
    """Within a pool over the links of its devices, of two machines the network; to another pool over the cluster's."""
    cluster, (actor, sampler) = Cluster.parse("16xH100"), roles_of(("actor", "rollout"), "fsdp2")
    for devices, link in ((8, 450e9), (16, 50e9)):
        sizes = {"devices": devices, "parallel": Parallel(data=devices)}
        run = RunPlan((replace(actor, **sizes), replace(sampler, **sizes)), dict.fromkeys(GRPO, SHAPE), WORK)
        cost = role_cost(run.roles[1], SHAPE, WORK, cluster)
        seconds = 2 * SHAPE.parameters / link / EFFICIENCY["link"].likely
        assert cost.update == Estimate.of(run, cluster).seconds[1].phase("sync").likely == pytest.approx(seconds)
    split = replace(run, roles=(run.roles[0], replace(run.roles[1], pool="samplers", devices=8)))
    assert Estimate.of(split, cluster).seconds[1].phase("sync").likely == pytest.approx(seconds)
    assert cost.update_across == pytest.approx(seconds)
