"""Profiled steps: which are recorded, of which roles, on which processes, and what lies in the files."""

from __future__ import annotations

import gzip
import json
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.harness.configs import changed
from tests.harness.rows import talks, write_prompts
from tests.harness.runs import COMMON, prepare
from tests.harness.scorers import scorer
from verl.config import ProfilerConfig, load_config
from verl.config.loading.configuration import read_config
from verl.config.machine.profiling import nsight_options
from verl.errors import ConfigError, NotBuiltError
from verl.metrics import notices, reset_notices
from verl.observability import profiler as profiling
from verl.observability.profiler import ProfiledSteps, RoleProfiler, mini_batch_done
from verl.trainer import main_ppo, runtime, sft_trainer

RUN = changed(
    COMMON,
    "data.max_response_length=4",
    "actor_rollout_ref.rollout.n=2",
    "actor_rollout_ref.actor.ppo_mini_batch_size=2",
    "actor_rollout_ref.actor.use_kl_loss=true",
    "trainer.device=cpu",
    "trainer.total_training_steps=2",
    "trainer.logger=[]",
    "global_profiler.tool=torch",
    "global_profiler.save_path=found",
)
ACTOR, REF = "actor_rollout_ref.actor.profiler", "actor_rollout_ref.ref.profiler"


@pytest.fixture
def here(workplace: Path) -> Path:
    prepare(scorer("len(solution_str)"))
    return workplace


def files(folder: str | Path = "found") -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in Path(folder).rglob("*") if path.is_file())


def events(path: str | Path) -> list[dict]:
    return json.loads(gzip.decompress(Path(path).read_bytes()))["traceEvents"]


def ranges(path: str | Path) -> set[str]:
    """Names of the ranges in a trace that say a role and a method."""
    return {event["name"] for event in events(path) if event.get("cat") == "user_annotation" and "/" in event["name"]}


def operators(path: str | Path) -> set[str]:
    return {event["name"] for event in events(path) if event.get("cat") == "cpu_op"}


def test_one_recording_of_a_step_tells_the_phases_of_all_roles_apart(here):
    main_ppo.run_ppo(load_config("ppo_trainer", [*RUN, "global_profiler.steps=[2]", f"{ACTOR}.enable=true"]))
    assert files() == ["step_2/actor_rank0.json.gz"]
    found = ranges("found/step_2/actor_rank0.json.gz")
    assert {"actor/train", "rollout/generate_sequences", "ref/infer"} <= found
    assert "aten::mm" in operators("found/step_2/actor_rank0.json.gz")


def test_discrete_recordings_hold_one_call_of_an_enabled_role_each(here):
    chosen = [f"{REF}.enable=true", f"{REF}.tool_config.torch.discrete=true", "global_profiler.steps=[1,2]"]
    chosen += [f"{ACTOR}.enable=true", f"{ACTOR}.tool_config.torch.discrete=true"]
    main_ppo.run_ppo(load_config("ppo_trainer", [*RUN, *chosen]))
    step = ["actor_infer_0", "actor_train_1", "actor_train_2", "ref_infer_0"]
    assert files() == [f"step_{number}/{name}_rank0.json.gz" for number in (1, 2) for name in step]
    assert ranges("found/step_1/actor_train_2_rank0.json.gz") == {"actor/train"}


def test_steps_in_a_row_share_a_recording_that_is_written_at_the_end_of_the_run_at_the_latest(here):
    rows = ["global_profiler.steps=[1,2,3]", "global_profiler.profile_continuous_steps=true", f"{ACTOR}.enable=true"]
    main_ppo.run_ppo(load_config("ppo_trainer", [*RUN, *rows]))  # which has two steps
    assert files() == ["step_1_to_3/actor_rank0.json.gz"]


def test_a_supervised_run_records_its_steps(here):
    write_prompts("sft.parquet", talks(6))
    told = ["data.train_files=sft.parquet", "data.train_batch_size=2", "model.path=model", "trainer.total_epochs=1"]
    told += ["trainer.device=cpu", "trainer.logger=[]", "trainer.profile_interval=[2,3]", "profiler.enable=true"]
    sft_trainer.run_sft(load_config("sft_trainer", [*told, "profiler.save_path=found"]))
    assert files() == ["step_2/model_rank0.json.gz", "step_3/model_rank0.json.gz"]
    assert ranges("found/step_2/model_rank0.json.gz") == {"model/train"}


def test_a_schedule_records_the_mini_batches_it_names_cycle_by_cycle(tmp_path):
    plan = {"skip_first": 1, "wait": 1, "warmup": 0, "active": 1, "repeat": 2}
    config = ProfilerConfig(
        enable=True, tool="torch", save_path=str(tmp_path), tool_config={"torch": {"schedule": plan}}
    )
    profiler = RoleProfiler("actor", config, 0)
    profiler.begin("step_1")
    with profiler.phase("update_actor"):
        for number in range(6):  # skipped, waited, recorded, waited, recorded, after the last cycle
            torch.ones(number + 1).sum()
            with torch.profiler.record_function(f"mini/{number}"):
                pass
            mini_batch_done()
    profiler.end()
    assert files(tmp_path) == [f"step_1/actor_rank0_cycle{cycle}.json.gz" for cycle in (0, 1)]
    assert [ranges(tmp_path / name) & {f"mini/{n}" for n in range(6)} for name in files(tmp_path)] == [
        {"mini/2"},
        {"mini/4"},
    ]


def test_only_the_chosen_processes_of_a_role_record():
    def chosen(**settings: object) -> list[int]:
        config = ProfilerConfig(enable=True, tool="torch", **settings)
        return [rank for rank in range(4) if RoleProfiler("actor", config, rank).records]

    assert (chosen(), chosen(ranks=[1, 3]), chosen(all_ranks=True)) == ([0], [1, 3], [0, 1, 2, 3])
    assert not RoleProfiler("actor", ProfilerConfig(tool="torch"), 0).records


def test_steps_in_a_row_are_one_recording_where_asked():
    apart, joined = ProfiledSteps([2, 3, 6]), ProfiledSteps([2, 3, 6], continuous=True)
    names = [[steps.beginning(step) for step in range(1, 8)] for steps in (apart, joined)]
    assert names[0] == [None, "step_2", "step_3", None, None, "step_6", None]
    assert names[1] == [None, "step_2_to_3", None, None, None, "step_6", None]
    assert [step for step in range(1, 8) if joined.is_end(step)] == [3, 6]


def test_an_error_inside_a_discrete_phase_ends_its_recording(tmp_path):
    tools = {"torch": {"discrete": True}}
    config = ProfilerConfig(enable=True, tool="torch", save_path=str(tmp_path), tool_config=tools)
    profiler = RoleProfiler("ref", config, 0)
    profiler.begin("step_1")
    with pytest.raises(ZeroDivisionError), profiler.phase("infer"):
        raise ZeroDivisionError
    assert profiling._running is None and files(tmp_path) == ["step_1/ref_infer_0_rank0.json.gz"]


def test_a_memory_history_is_begun_written_and_ended(tmp_path, monkeypatch):
    calls: list[tuple] = []
    spy = SimpleNamespace(
        _record_memory_history=lambda **words: calls.append(("record", words)),
        _dump_snapshot=lambda path: calls.append(("dump", Path(path).relative_to(tmp_path).as_posix())),
    )
    monkeypatch.setattr(torch.cuda, "memory", spy)  # torch keeps one of CUDA devices only
    tools = {"torch_memory": {"trace_alloc_max_entries": 7}}
    config = ProfilerConfig(enable=True, tool="torch_memory", save_path=str(tmp_path), tool_config=tools)
    profiler = RoleProfiler("actor", config, 0)
    profiler.begin("step_4")
    mini_batch_done()
    profiler.end()
    assert calls == [
        ("record", {"max_entries": 7}),
        ("dump", "step_4/actor_rank0.pickle"),
        ("record", {"enabled": None}),
    ]


@pytest.mark.parametrize("discrete", [False, True])
def test_nsight_captures_a_step_or_each_call_under_the_names_of_its_ranges(monkeypatch, discrete):
    calls: list[str] = []
    cuda = SimpleNamespace(start=lambda: calls.append("start"), stop=lambda: calls.append("stop"))
    monkeypatch.setattr(torch.cuda, "profiler", cuda)  # there is no CUDA device here
    monkeypatch.setattr(torch.cuda, "nvtx", SimpleNamespace(range=lambda name: nullcontext(calls.append(name))))
    config = ProfilerConfig(enable=True, tool="nsys", tool_config={"nsys": {"discrete": discrete}})
    profiler = RoleProfiler("actor", config, 0)
    profiler.begin("step_4")
    for method in ("infer", "train"):
        with profiler.phase(method):
            mini_batch_done()
    profiler.end()
    with profiler.phase("train"):
        pass
    apart = ["start", "actor/infer", "stop", "start", "actor/train", "stop"]
    assert calls == (apart if discrete else ["start", "actor/infer", "actor/train", "stop"])


def test_the_options_of_nsight_reach_the_options_of_rays_actors(here, monkeypatch):
    from ray import runtime_env

    from verl.single_controller import ray as cluster
    from verl.single_controller.ray import worker_group
    from verl.single_controller.ray.class_with_args import RayClassWithInitArgs
    from verl.single_controller.ray.cluster import devices_per_node
    from verl.single_controller.ray.launch import actor_options

    key = "global_profiler.global_tool_config.nsys.worker_nsight_options"
    chosen = [
        "global_profiler.tool=nsys",
        "global_profiler.steps=[2,5]",
        f"{key}.trace=[cuda,nvtx]",
        f"{key}.cuda-memory-usage=false",
        f"{key}.kill=null",
        f"{ACTOR}.enable=true",
    ]
    config = read_config("ppo_trainer", [*RUN, *chosen, "trainer.runtime=ray"])
    options = {
        "trace": "cuda,nvtx", "cuda-memory-usage": "false", "cuda-graph-trace": "graph",
        "capture-range": "cudaProfilerApi", "capture-range-end": "repeat-shutdown:12",
    }  # fmt: skip
    assert nsight_options({"trace": "cuda", "capture-range": None}, [2]) == {"trace": "cuda"}
    plans = []
    monkeypatch.setattr(
        cluster, "start_cluster", lambda *_, **__: SimpleNamespace(device="cpu", nodes=[], is_owned=True)
    )
    monkeypatch.setattr(f"{devices_per_node.__module__}.devices_per_node", lambda device: 1)
    monkeypatch.setattr(worker_group, "launch", lambda plan, slots: plans.append(plan) or 1 / 0)
    worker = RayClassWithInitArgs(SimpleNamespace)
    worker.update_options({"runtime_env": {"env_vars": {"A": "1"}}})
    off = read_config("ppo_trainer", [*RUN, "global_profiler.steps=[2]", f"{key}.trace=cuda", "trainer.runtime=ray"])
    for one in (config, off):
        with pytest.raises(ZeroDivisionError):
            runtime._on_ray(one, is_restart=False)[1].group_class(None, worker)
    asked = [actor_options(plan, "worker[0]", None)["runtime_env"] for plan in plans]
    assert runtime_env.RuntimeEnv(**asked[0])  # Ray takes them
    assert asked == [{"env_vars": {"A": "1"}, "nsight": options}, {"env_vars": {"A": "1"}}]


@pytest.mark.parametrize(
    "changes, error, told",
    [
        (["global_profiler.steps=[0]", f"{ACTOR}.enable=true"], ConfigError, "counted from 1"),
        ([f"{ACTOR}.tool_config.torch.contents=[cpus]", f"{ACTOR}.enable=true"], ConfigError, "cpu.*cuda.*memory"),
        (["global_profiler.tool=nsys", f"{ACTOR}.enable=true"], ConfigError, "(CUDA devices only|no program 'nsys')"),
        ([f"{ACTOR}.tool=nsys", f"{ACTOR}.enable=true"], ConfigError, "all workers, and only a role names it"),
        (["global_profiler.tool=npu", f"{ACTOR}.enable=true"], NotBuiltError, "Ascend.*tool=torch"),
        (["global_profiler.tool=torch_memory", f"{ACTOR}.enable=true"], ConfigError, "CUDA devices only"),
        (["global_profiler.tool=null", f"{ACTOR}.enable=true"], ConfigError, "by no tool"),
        (
            [
                f"{ACTOR}.{name}"
                for name in ("enable=true", "tool_config.torch.discrete=true", "tool_config.torch.schedule.active=1")
            ],
            ConfigError,
            "counts the mini-batches",
        ),
    ],
)
def test_what_cannot_be_recorded_is_refused_before_the_run(here, changes, error, told):
    with pytest.raises(error, match=f"(?s){told}"):
        load_config("ppo_trainer", [*RUN, "global_profiler.steps=[1]", *changes])


@pytest.mark.parametrize(
    "program, change, key",
    [
        ("ppo_trainer", "global_profiler.steps=[1]", "global_profiler.steps"),
        ("ppo_trainer", f"{ACTOR}.enable=true", f"{ACTOR}.enable"),
        ("sft_trainer", "trainer.profile_interval=[1,1]", "trainer.profile_interval"),
        ("sft_trainer", "profiler.enable=true", "profiler.enable"),
    ],
)
def test_what_would_record_nothing_gets_a_notice(here, program, change, key):
    sft = ["data.train_files=train.parquet", "model.path=model", "trainer.device=cpu"]
    reset_notices()
    load_config(program, [*(RUN if program == "ppo_trainer" else sft), change])
    assert "nothing is profiled without" in notices()[key]


def test_an_interval_of_a_supervised_run_is_checked(here):
    told = ["data.train_files=sft.jsonl", "model.path=model", "trainer.device=cpu"]
    Path("sft.jsonl").write_text("{}\n")
    for change, message in [
        ("trainer.profile_interval=[3,2]", "before the first"),
        ("trainer.profile_interval=[3]", "two steps"),
    ]:
        with pytest.raises(ConfigError, match=message):
            load_config("sft_trainer", [*told, change])
