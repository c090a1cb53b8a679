"""`python -m verl.planner` on small runs: what it finds in faulty ones, and its estimates of sound ones."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from pyarrow.parquet import write_table

from tests.harness.configs import changed
from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.cli.planning import main
from verl.config import PPOTrainerConfig
from verl.config.loading.configuration import read_config, save_config
from verl.errors import ConfigError
from verl.metrics import notices, reset_notices
from verl.planner.hardware import Cluster, device, to_json
from verl.planner.ranges import EFFICIENCY, Reached
from verl.rewards import RewardFunction, Scorer, ScoringLimits
from verl.storage.formats import read_table

SOUND = [
    "actor_rollout_ref.model.path=model",
    "data.train_files=rows.jsonl",
    "data.val_files=null",
    "reward.custom_reward_function.path=reward.py",
    "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4",
    "data.max_prompt_length=64",
    "data.max_response_length=16",
    "algorithm.adv_estimator=grpo",
    "actor_rollout_ref.rollout.n=2",
    "trainer.total_training_steps=2",
    "trainer.device=cpu",
]
LARGE = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32}
ON_GPU = ("actor_rollout_ref.rollout.name=vllm", "trainer.device=cuda")


@pytest.fixture
def here(workplace: Path) -> Path:
    tiny_model_dir("model")
    rows = [{"prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}} for n in range(8)]
    write_prompts("rows.jsonl", rows)
    Path("reward.py").write_text("def compute_score(solution_str, ground_truth):\n    return len(solution_str) / 4\n")
    return workplace


def nothing() -> None:
    """The files stay as they are."""


def write(name: str, text: str) -> Callable[[], None]:
    return lambda: Path(name).write_text(text) and None


def enlarge() -> None:
    """A model of 8 billion parameters, by its config.json."""
    file = Path("model/config.json")
    small = json.loads(file.read_text())
    file.write_text(json.dumps(small | LARGE | {"layer_types": ["full_attention"] * LARGE["num_hidden_layers"]}))


def forget_template() -> None:
    Path("model/chat_template.jinja").unlink(missing_ok=True)
    file = Path("model/tokenizer_config.json")
    settings = json.loads(file.read_text())
    settings.pop("chat_template", None)
    file.write_text(json.dumps(settings))


def without_truth() -> None:
    write_prompts("rows.jsonl", [{"prompt": "1+1=", "data_source": "openai/gsm8k"}] * 8)


_A = "actor_rollout_ref.actor"
FAULTS = {
    "a misspelt key": (nothing, ["algorithm.adv_estimatr=grpo"], "algorithm.adv_estimatr"),
    "a word for a number": (nothing, ["trainer.nnodes=two"], "trainer.nnodes"),
    "an unknown estimator": (nothing, ["algorithm.adv_estimator=grppo"], "algorithm.adv_estimator"),
    "a group of one": (nothing, ["actor_rollout_ref.rollout.n=1"], "actor_rollout_ref.rollout.n"),
    "no file": (nothing, ["data.train_files=row.jsonl"], "data.train_files"),
    "no such column": (nothing, ["data.prompt_key=question"], "question"),
    "mini-batches that do not divide": (nothing, ["data.train_batch_size=6"], "ppo_mini_batch_size"),
    "pairs that ranks do not divide": (
        nothing,
        ["trainer.n_gpus_per_node=3", f"{_A}.policy_loss.loss_mode=recipe.spin.core:dpo", f"{_A}.dpo_beta=0.1"],
        f"{_A}.ppo_mini_batch_size",
    ),
    "a sampler over two devices": (
        nothing,
        ["actor_rollout_ref.rollout.tensor_model_parallel_size=2"],
        "actor_rollout_ref.rollout.tensor_model_parallel_size",
    ),
    "a token budget below one row": (
        nothing,
        ["actor_rollout_ref.actor.use_dynamic_bsz=true", "actor_rollout_ref.actor.ppo_max_token_len_per_gpu=32"],
        "ppo_max_token_len_per_gpu",
    ),
    "no reward file": (nothing, ["reward.custom_reward_function.path=rewards.py"], "custom_reward_function"),
    "a reward that fails": (
        write("reward.py", "def compute_score(solution_str, ground_truth):\n    return float(solution_str)\n"),
        [],
        "fails on row 0",
    ),
    "a reward file without a function": (
        write("reward.py", "ANSWER = 42\n"),
        [],
        "reward.custom_reward_function.path",
    ),
    "rows without a ground truth": (without_truth, ["reward.custom_reward_function.path=null"], "ground_truth"),
    "an unknown source": (nothing, ["reward.custom_reward_function.path=null"], "data_source"),
    "a folder without a model": (lambda: shutil.rmtree("model"), [], "actor_rollout_ref.model.path"),
    "a tokenizer without a template": (forget_template, [], "chat template"),
    "a prompt that is too long": (nothing, ["data.max_prompt_length=3", "data.truncation=error"], "max_prompt_length"),
    "an unknown schedule": (nothing, ["trainer.v1.trainer_mode=one_step_of"], "trainer.v1.trainer_mode"),
    "a bound below zero": (
        nothing,
        ["trainer.v1.trainer_mode=fully_async", "async_training.staleness_threshold=-1"],
        "staleness_threshold",
    ),
    "a model that does not fit": (enlarge, ["--devices=RTX4090", *ON_GPU], "actor_rollout_ref"),
    "a cache without room": (
        enlarge,
        ["--devices=H200", *ON_GPU, "actor_rollout_ref.rollout.gpu_memory_utilization=0.05"],
        "gpu_memory_utilization",
    ),
    "more processes than devices": (nothing, ["--devices=2xH100", "trainer.n_gpus_per_node=4", *ON_GPU], "at most 2"),
    "an engine of another name": (nothing, ["--devices=H1000"], "--devices"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_a_planted_fault_is_found_with_its_key_and_a_way_out(here, capsys, fault):
    plant, words, key = FAULTS[fault]
    plant()
    assert main(["check", *changed(SOUND, *words)]) != 0
    printed = "".join(capsys.readouterr())
    assert key in printed


def test_nothing_is_found_in_a_sound_run(here, capsys):
    assert main(["check", *SOUND]) == 0
    assert capsys.readouterr().out.strip().endswith("no findings: the run can start")
    assert {path.name for path in here.iterdir()} <= {"model", "rows.jsonl", "reward.py", "__pycache__"}


def test_a_full_disk_is_found_before_the_first_checkpoint(here, capsys, monkeypatch):
    full = shutil.disk_usage(".")._replace(free=1000)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: full)
    assert main(["check", *SOUND, "trainer.save_freq=1"]) == 1
    assert "trainer.default_local_dir" in capsys.readouterr().out


def test_the_disk_of_another_machine_is_not_measured(here, capsys, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: pytest.fail("a disk was measured"))
    assert main(["check", "--devices=H100", *changed(SOUND, *ON_GPU), "trainer.save_freq=1"]) == 0


@pytest.mark.parametrize("missing", [0, 1])
def test_without_a_number_of_steps_rows_and_epochs_say_it(here, capsys, monkeypatch, missing):
    """Of 8 rows in batches of 4, three epochs are six steps, of which every other one is saved."""
    words = [*changed(SOUND, "trainer.total_training_steps=null"), "trainer.save_freq=2", "trainer.total_epochs=3"]
    assert main(["estimate", "--json", *words]) == 0
    numbers, usage = json.loads(capsys.readouterr().out), shutil.disk_usage(".")
    assert numbers["device_hours"] is None
    assert numbers["device_hours_per_step"] == pytest.approx(numbers["step"]["likely"] / 3600)
    free = 3 * numbers["checkpoint_bytes"] - missing
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free))
    assert main(["check", *words]) == missing
    assert ("6 step(s)" in capsys.readouterr().out) is bool(missing)
    assert main(["estimate", *words]) == 0
    assert "device hours per step" in " ".join(capsys.readouterr().out.split())


def test_rows_are_counted_without_the_data_and_at_most(here, capsys, monkeypatch):
    """The prompts that a filter leaves out are not known yet."""
    from verl.trainer.planning import check

    write_table(read_table(Path("rows.jsonl")), "rows.parquet")
    usage, sound = shutil.disk_usage("."), changed(SOUND, "data.train_files=rows.parquet")
    steps = changed(sound, "trainer.total_training_steps=null")
    monkeypatch.setattr(check, "read_table", lambda file: pytest.fail("all rows were read"))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=0))
    for words, number in (([*steps, "trainer.total_epochs=3"], "at most 6"), (sound, "2")):
        assert main(["check", *words, "trainer.save_freq=2", "data.filter_overlong_prompts=true"]) == 1
        assert f"checkpoints of {number} step(s)" in capsys.readouterr().out


def test_the_reward_function_has_the_limits_of_the_run(here, monkeypatch):
    from verl.trainer.planning import check

    limits: list[ScoringLimits] = []

    def record(function: RewardFunction, rules: ScoringLimits) -> Scorer:
        limits.append(rules)
        return Scorer(function, rules)

    monkeypatch.setattr(check, "Scorer", record)
    assert main(["check", *SOUND, "reward.timeout=20", "+reward.reward_kwargs.isolation=none"]) == 0
    assert [(each.timeout, each.isolation, each.num_workers) for each in limits] == [(20, "none", 1)]


@pytest.mark.parametrize("missing", [0, 1])
@pytest.mark.parametrize(("limits", "number"), [([], 4), (["trainer.max_actor_ckpt_to_keep=2"], 3)])
def test_room_is_needed_for_the_checkpoints_that_stay(here, capsys, monkeypatch, limits, number, missing):
    """Of 10 steps, 3, 6, 9 and the last one are saved; with a limit of two a third one is written before one falls."""
    usage, words = shutil.disk_usage("."), [*SOUND, "trainer.total_training_steps=10", "trainer.save_freq=3", *limits]
    assert main(["estimate", "--json", *words]) == 0
    size = json.loads(capsys.readouterr().out)["checkpoint_bytes"]
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=number * size - missing))
    assert main(["check", *words]) == missing
    assert ("trainer.default_local_dir" in capsys.readouterr().out) is bool(missing)


def test_the_critic_has_its_limit_of_checkpoints(here, capsys, monkeypatch):
    """Ten saves of the actor, and two of the critic, whose limit is one."""
    changes = ["algorithm.adv_estimator=gae", "critic.model.path=model", "trainer.total_training_steps=10"]
    words = [*changed(SOUND, *changes), "trainer.save_freq=1", "trainer.max_critic_ckpt_to_keep=1"]
    assert main(["estimate", "--json", *words]) == 0
    sizes = {role["role"]: role["checkpoint"] for role in json.loads(capsys.readouterr().out)["memory"]}
    free = 10 * sizes["actor"] + 2 * sizes["critic"]
    assert sizes["critic"] > 1000
    usage = shutil.disk_usage(".")
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free + 1))
    assert main(["check", *words]) == 0
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=free - 1))
    assert main(["check", *words]) == 1


def test_a_sound_run_with_a_teacher_gets_a_notice_and_no_finding(here, capsys):
    reset_notices()
    tiny_model_dir("teacher")
    words = ["distillation.enabled=true", "distillation.teacher_models.teacher.model_path=teacher"]
    assert main(["check", *SOUND, *words]) == 0
    assert "no findings" in capsys.readouterr().out
    assert "memory and disk are not checked" in notices()["planner"]


def test_unknown_devices_are_refused_before_rows_are_read(here, capsys, monkeypatch):
    from verl.trainer.planning import check

    monkeypatch.setattr(check, "_rows", lambda config: pytest.fail("rows were read"))

    def this_machine(config: PPOTrainerConfig) -> Cluster:
        raise ConfigError("say what the devices are", key="--devices")

    with pytest.raises(ConfigError, match="say what the devices are"):
        check.findings(SOUND, None, this_machine)


def test_findings_are_objects_in_json(here, capsys):
    assert main(["check", "--json", *changed(SOUND, "algorithm.adv_estimator=grppo")]) == 1
    (finding,) = json.loads(capsys.readouterr().out)
    assert finding["key"] == "algorithm.adv_estimator" and finding["got"] == "grppo"
    assert "grpo" in finding["allowed"] and "'grpo'" in finding["fix"]


def test_an_estimate_has_every_role_and_phase(here, capsys):
    words = ["estimate", "--json", "--devices", "8xH100", *changed(SOUND, *ON_GPU, "trainer.n_gpus_per_node=4")]
    assert main([*words, "actor_rollout_ref.actor.use_kl_loss=true"]) == 0
    estimate = json.loads(capsys.readouterr().out)
    phases = {role["role"]: [phase["phase"] for phase in role["phases"]] for role in estimate["memory"]}
    assert phases == {
        "actor": ["idle", "update"],  # one update per step needs no old log-probs
        "rollout": ["idle", "generate", "sync"],
        "ref": ["idle", "infer"],
    }
    assert estimate["devices"] == 4 and estimate["device"] == "H100"
    assert estimate["step"]["low"] < estimate["step"]["likely"] < estimate["step"]["high"]
    assert estimate["problems"] == []
    # Four weights' worth of 4 bytes on four devices: 59,200 parameters of the tiny model, its head tied or not.
    update = estimate["memory"][0]["phases"][1]
    assert update["weights"] * 2 == update["optimizer"] == update["gradients"] * 2


def test_the_tables_of_an_estimate_name_what_does_not_fit(here, capsys):
    enlarge()
    assert main(["estimate", "--devices=RTX4090", *changed(SOUND, *ON_GPU)]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "GB per device" in printed and "does not fit: actor_rollout_ref" in printed


def test_an_unknown_command_is_answered_with_all_commands(capsys):
    with pytest.raises(SystemExit):
        main(["estimat"])
    message = capsys.readouterr().err
    assert "estimat" in message and all(f"'{name}'" in message for name in ("estimate", "check", "plan"))


def live_run(seconds: list[float]) -> None:
    """A folder of a run with its settings and the metrics of its steps."""
    config = read_config("ppo_trainer", [*changed(SOUND, "trainer.total_training_steps=20")])
    save_config(config, "run/config.yaml")
    steps = [{"step": n + 1, "data": {"timing_s/step": s, "timing_s/gen": s / 2, "timing_s/old_log_prob": 0.5}}
             for n, s in enumerate(seconds)]  # fmt: skip
    Path("run/metrics.jsonl").write_text("".join(json.dumps(step) + "\n" for step in steps))


def test_what_is_left_of_a_run_stands_beside_what_was_predicted(here, capsys):
    """Of 20 steps 12 are done, the last ten in 4 s each: 8 x 4 s."""
    live_run([100.0, 100.0, *[4.0] * 10])
    assert main(["estimate", "--live", "run", "--price", "900", "--json"]) == 0
    left = json.loads(capsys.readouterr().out)
    assert left["seconds"] == {"generate": 2.0, "infer": 0.5, "step": 4.0}
    assert (left["last_step"], left["total_steps"], left["seconds_left"]) == (12, 20, 32.0)
    assert left["device_hours_left"] == pytest.approx(32 / 3600) and left["price_left"] == pytest.approx(8.0)
    assert left["predicted"].keys() == left["seconds"].keys()
    assert left["predicted"]["step"]["likely"] > left["predicted"]["generate"]["likely"] > 0
    assert main(["estimate", "--live", "run"]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert "step 12 of 20" in printed and "0:00:32" in printed and "cost" not in printed


def test_metrics_outside_of_the_folder_are_named_by_a_flag(here, capsys):
    live_run([4.0] * 12)
    Path("run/metrics.jsonl").rename("elsewhere.jsonl")
    assert main(["estimate", "--live", "run"]) == 2
    assert "no metrics.jsonl" in capsys.readouterr().err
    assert main(["estimate", "--live", "run", "--metrics", "elsewhere.jsonl", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["seconds_left"] == 32.0
    assert main(["estimate", "--metrics", "elsewhere.jsonl", *SOUND]) == 2
    assert "--live" in capsys.readouterr().err


def test_a_run_that_has_logged_no_step_is_named(here, capsys):
    live_run([])
    assert main(["estimate", "--live", "run"]) == 2
    assert "--live" in (message := capsys.readouterr().err) and "no step yet" in message


def test_flags_belong_to_the_commands_that_read_them(here, capsys):
    for command in ("check", "estimate"):
        with pytest.raises(SystemExit):
            main([command, "--help"])
        assert "--schedule" not in capsys.readouterr().out
    with pytest.raises(SystemExit):
        main(["plan", "--help"])
    printed = capsys.readouterr().out
    assert "--schedule" in printed and "--live" not in printed


def test_an_estimate_takes_the_figures_of_a_calibration(here, capsys):
    """Twice the peak halves a pass, and a share of one value leaves it no range."""
    cpu = device("CPU")
    seconds = []
    for factor in (1, 2):
        reached = {name: Reached(0.5, 0.5, 0.5, "measured") for name in EFFICIENCY}
        measured = replace(cpu, bf16_flops=factor * cpu.bf16_flops, reached=reached)
        Path("cpu.json").write_text(json.dumps(to_json(measured)))
        assert main(["estimate", "--json", "--hardware", "cpu.json", *SOUND]) == 0
        (update,) = [role["phases"]["update"] for role in json.loads(capsys.readouterr().out)["seconds"]
                     if role["role"] == "actor"]  # fmt: skip
        assert update["low"] == update["likely"] == update["high"]
        seconds.append(update["likely"])
    assert seconds[0] == pytest.approx(2 * seconds[1])
    assert main(["estimate", "--devices=8xH100", "--hardware", "cpu.json", *SOUND]) == 2
    assert "another device" in capsys.readouterr().err
