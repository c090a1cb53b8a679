"""Who lives where: the page has the tables that a run prints; what cannot be placed is refused with its numbers."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple

import pytest
import yaml

from tests.harness.configs import refused
from verl.config import HFModelConfig, load_config
from verl.config.loading.configuration import read_config
from verl.config.machine.topology import Topology, per_config
from verl.errors import ConfigError

A, R = "actor_rollout_ref", "actor_rollout_ref.rollout"
T, P, BACKEND = f"{R}.tensor_model_parallel_size", f"{R}.pipeline_model_parallel_size", f"{R}.checkpoint_engine.backend"
POOL, EIGHT = "+trainer.resource_pools", "trainer.n_gpus_per_node=8"
VLLM = f"{R}.name=vllm"
OWN = [f"{A}.hybrid_engine=false", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=2", f"{BACKEND}=gloo"]
PAGE = Path(__file__).parents[2] / "docs" / "howto" / "placement.md"
EXAMPLE = re.compile(
    r"```bash\npython -m verl\.trainer\.main_ppo --cfg job (.*?)\n```\n\n```text\n(.*?)\n```", re.DOTALL
)


class Example(NamedTuple):
    words: list[str]
    table: str


EXAMPLES = [
    Example(shlex.split(words.replace("\\\n", "")), table) for words, table in EXAMPLE.findall(PAGE.read_text())
]


def placed(*words, added=()):
    return Topology.of(read_config("ppo_trainer", ["algorithm.adv_estimator=grpo", *words]), added)


def test_the_page_has_five_topologies():
    assert len(EXAMPLES) == 5


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda example: example.table.partition("\n")[0])
def test_the_page_shows_the_table_that_its_command_prints(example):
    assert str(Topology.of(read_config("ppo_trainer", example.words))) == example.table


def test_a_printed_configuration_ends_with_the_table_as_comments_and_stays_yaml(capsys):
    words, table = EXAMPLES[2]
    with pytest.raises(SystemExit) as left:
        load_config("ppo_trainer", ["--cfg", "job", *words])
    printed = capsys.readouterr().out
    assert left.value.code == 0
    assert printed.endswith("\n".join(f"# {line}".rstrip() for line in table.splitlines()) + "\n")
    assert yaml.safe_load(printed)["trainer"]["n_gpus_per_node"] == 4


def test_a_printed_configuration_without_a_topology_has_no_table(capsys):
    with pytest.raises(ConfigError, match="8 processes"):
        load_config("ppo_trainer", ["--cfg", "job", f"{T}=3", f"{R}.name=vllm", EIGHT])
    assert "#" not in capsys.readouterr().out


def test_an_address_is_printed_without_its_password(capsys):
    shown = str(placed(f"{R}.name=server", f"{R}.server.url=http://me:secret@host:8000"))
    assert "host:8000" in shown and "secret" not in shown


def test_processes_of_a_replica_are_peers_and_the_first_leads_and_is_fed_by_itself():
    topology = placed(VLLM, EIGHT, f"{T}=2")
    assert [replica.ranks for replica in topology.replicas] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [replica.fed_by for replica in topology.replicas] == [0, 2, 4, 6]
    assert [replica.leader for replica in topology.replicas] == [0, 2, 4, 6]


def test_processes_for_agent_loops_are_counted_on_ray_and_a_run_of_one_process_has_none():
    words = [f"{R}.agent.num_workers=3"]
    assert placed(*words).loops == placed("trainer.n_gpus_per_node=2").loops == 0
    topology = placed("trainer.n_gpus_per_node=2", *words)
    assert topology.loops == 3 and topology.processes == 2
    assert str(topology).startswith("2 processes on Ray, and 3 without a device for agent loops\n")


def test_replicas_apart_from_the_trainers_are_fed_by_rank_j_mod_n_each_once():
    apart = [f"{A}.hybrid_engine=false", f"{R}.nnodes=1", f"{R}.n_gpus_per_node=5", f"{BACKEND}=gloo"]
    topology = placed("trainer.n_gpus_per_node=2", *apart)
    assert [replica.fed_by for replica in topology.replicas] == [0, 1, 0, 1, 0]
    assert [[replica.number for replica in topology.fed_by(rank)] for rank in (0, 1)] == [[0, 2, 4], [1, 3]]
    servers = [f"{R}.name=server", f"{R}.server.url=[http://a:1,http://b:1]"]
    assert [replica.fed_by for replica in placed("trainer.n_gpus_per_node=4", *servers).replicas] == [0, 1]
    assert [replica.fed_by for replica in placed(*servers).replicas] == [0, 0]


@pytest.mark.parametrize(
    "words, placement",
    [
        ([], "in place"),
        (["trainer.runtime=ray"], "colocated"),
        (["trainer.n_gpus_per_node=2"], "colocated"),
        ([f"{BACKEND}=shared_memory"], "child process"),
        (["trainer.n_gpus_per_node=2", f"{BACKEND}=gloo"], "child process"),
        ([f"{R}.name=sglang"], "child process"),
        (OWN, "own pool"),
        ([POOL + ".s={roles: [rollout], processes: [1]}", f"{BACKEND}=gloo"], "own pool"),
        ([f"{R}.name=sglang", f"{R}.server.url=http://a:1"], "HTTP"),
    ],
)
def test_the_placement_of_a_replica(words, placement):
    assert {replica.placement for replica in placed(*words).replicas} == {placement}


def test_a_run_of_one_process_holds_a_replica_of_any_size_of_an_engine_that_starts_its_processes():
    topology = placed(f"{R}.name=vllm", f"{T}=4", f"{P}=2")
    assert [replica.ranks for replica in topology.replicas] == [(0,)] and topology.spec.devices == 8


def test_parallel_sizes_of_every_backend():
    megatron = [
        f"{A}.actor.megatron.tensor_model_parallel_size=2",
        f"{A}.actor.megatron.pipeline_model_parallel_size=2",
    ]
    sizes = placed(EIGHT, f"{A}.actor.strategy=megatron", *megatron).part("actor").sizes
    assert (sizes.data, sizes.tensor, sizes.pipeline, sizes.sequence) == (2, 2, 2, 1)  # 8 = 2 x 2 x 2
    shared = placed(EIGHT, f"{A}.actor.fsdp_config.ulysses_sequence_parallel_size=4").part("actor").sizes
    assert (shared.data, shared.tensor, shared.pipeline, shared.sequence) == (2, 1, 1, 4)  # 8 = 2 x 4
    assert placed().part("actor").backend == "plain" and placed(EIGHT).part("actor").backend == "fsdp2"


def test_a_role_of_a_recipe_lives_where_the_pool_of_its_name_is():
    class Judge:
        name, pool, strategy = "judge", "rm", "auto"
        fsdp = read_config("ppo_trainer", []).critic.fsdp
        megatron = None

    topology = placed(EIGHT, POOL + ".judges={roles: [rm], processes: [2, 1]}", added=[Judge()])
    judge = topology.part("judge")
    assert (judge.pool, judge.backend, judge.sizes.data) == ("judges", "fsdp2", 3)
    assert topology.pool_of("judge").processes == (2, 1) and topology.processes == 11


def test_pools_in_which_nobody_lives_are_left_out():
    topology = placed(POOL + ".values={roles: [critic], processes: [4]}")
    assert [pool.name for pool in topology.pools] == ["global_pool"] and topology.runtime == "local"


def test_a_table_of_many_replicas_is_cut_in_the_middle():
    lines = str(placed("trainer.n_gpus_per_node=8", "trainer.nnodes=4")).splitlines()
    numbers = [line.split()[0] for line in lines[lines.index(next(s for s in lines if s.startswith("replica"))) + 1 :]]
    assert numbers == ["0", "1", "2", "3", "4", "5", "6", "...", "31"]
    assert any("8 + 8 + 8 + 8" in line for line in lines)


IMPOSSIBLE = [
    ([VLLM, EIGHT, f"{T}=3"], f"{T}: 8 processes hold 2 replicas of 3 (tensor) = 3, and 2 of them would hold nothing"),
    ([EIGHT, f"{T}=2"], f"{T}: the hf engine holds the whole model in one process. Got 2. Allowed: 1. Leave it out, or "
     f"set {R}.name to vllm or sglang"),
    (
        [f"{R}.name=vllm", "trainer.n_gpus_per_node=3", "trainer.nnodes=2", f"{T}=2"],
        "3 processes of a node hold 1 replica of 2 (tensor) = 2, and 1 of them would hold nothing",
    ),
    (
        [f"{R}.name=vllm", EIGHT, f"{T}=3", f"{P}=2"],
        "8 processes hold 1 replica of 3 (tensor) x 2 (pipeline) = 6, and 2 of them would hold nothing",
    ),
    ([*OWN, VLLM, f"{T}=4"], f"2 processes hold 0 replicas of 4 (tensor) = 4, and 2 of them would hold nothing. Got 4. "
     f"Allowed: 1, 2. Change it, or the number of processes ({R}.nnodes, {R}.n_gpus_per_node)."),
    ([f"{A}.hybrid_engine=false"], f"{R}.nnodes: separate samplers need a pool, and it has 0 nodes"),
    ([f"{R}.nnodes=2"], f"Got 2. Allowed: 0. Set {A}.hybrid_engine=false"),
    ([*OWN, f"{R}.nnodes=-1"], f"{R}.nnodes: out of range. Got -1"),
    ([*OWN, f"{R}.n_gpus_per_node=0"], f"{R}.n_gpus_per_node: out of range. Got 0"),
    ([*OWN, POOL + ".s={roles: [rollout], processes: [1]}"], "has a pool for the role 'rollout' as well"),
    ([*OWN, POOL + ".rollout_pool={roles: [critic], processes: [1]}"], "'rollout_pool'"),
    ([POOL + ".global_pool={roles: [critic], processes: [1]}"], "trainer.nnodes x trainer.n_gpus_per_node has this"),
    ([*OWN, f"{BACKEND}=naive"], "naive hands weights over inside one process"),
    ([*OWN, "trainer.nnodes=2", f"{BACKEND}=shared_memory"], "have 2 nodes, and shared_memory reaches the processes"),
    ([*OWN, f"{BACKEND}=cuda_ipc"], "cuda_ipc connects processes that share one. Got 'cuda_ipc'. Set "
     f"{BACKEND}=nccl."),
    ([*OWN, "trainer.nnodes=2", f"{BACKEND}=delta"], "one machine: its bytes travel over shared_memory, unless"),
    ([*OWN, "trainer.runtime=local"], "local, with global_pool 1, rollout_pool 2"),
    ([POOL + ".s={roles: [rollout], processes: [1]}", f"{BACKEND}=gloo", "trainer.runtime=local"], "local, with gl"),
    ([*OWN, f"{R}.name=server", f"{R}.server.url=[http://a:1,http://b:1]"], "2 servers sample, and the pool has no"),
]  # fmt: skip


@pytest.mark.parametrize("words, said", IMPOSSIBLE)
def test_what_cannot_be_placed_is_refused_with_its_numbers(words, said):
    assert said in refused(placed, *words)


@pytest.mark.parametrize("transport", ["gloo", "nccl"])
def test_samplers_may_have_two_nodes_of_their_own_whose_replicas_count_through_both(transport):
    own = [f"{A}.hybrid_engine=false", f"{R}.nnodes=2", f"{R}.n_gpus_per_node=4", f"{BACKEND}={transport}"]
    topology = placed("trainer.nnodes=2", "trainer.n_gpus_per_node=2", *own, VLLM, f"{T}=2")
    assert topology.pool_of("rollout").processes == (4, 4) and topology.processes == 12
    assert [replica.ranks for replica in topology.replicas] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [replica.fed_by for replica in topology.replicas] == [0, 1, 2, 3]
    assert "8 processes hold 2 replicas of 3 (tensor) = 3" in refused(placed, *own, VLLM, f"{T}=3")


def test_what_is_said_of_a_configuration_is_worked_out_once_for_each():
    seen = []
    answer = per_config(lambda config: seen.append(config) or len(seen))
    first, second = HFModelConfig(path="a"), HFModelConfig(path="a")
    assert [answer(first), answer(first), answer(second), answer(first)] == [1, 1, 2, 1]


def test_differences_of_weights_go_between_machines_over_a_transport_that_does():
    over = f"{R}.checkpoint_engine.engine_kwargs={{over: gloo}}"
    assert len(placed(*OWN, "trainer.nnodes=2", f"{BACKEND}=delta", over).replicas) == 2


def test_sglang_has_a_pool_of_its_own_where_a_transport_reaches_it():
    apart = placed(*OWN, f"{R}.name=sglang", f"{R}.n_gpus_per_node=4", f"{T}=2")
    assert [replica.ranks for replica in apart.replicas] == [(0, 1), (2, 3)]
    assert {replica.placement for replica in apart.replicas} == {"own pool"}
    running = refused(placed, *OWN, f"{R}.name=sglang", f"{R}.server.url=http://a:1")
    assert "1 server sample, and the pool has no process of theirs" in running
    assert "naive hands weights over inside one process" in refused(
        placed, *OWN, f"{BACKEND}=naive", f"{R}.name=sglang"
    )
