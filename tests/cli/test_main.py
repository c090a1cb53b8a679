"""The command ``verl``: what each word starts, prints and refuses."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.harness.rows import write_prompts
from verl.api.methods import BY_REWARD
from verl.cli.completion import complete_word, script
from verl.cli.help import COMMANDS, SETTINGS, program_help
from verl.cli.main import PRESETS, main
from verl.config.loading.groups import program_of
from verl.config.schema.node import schema_of

TINY = [
    "actor_rollout_ref.model.path=model", "data.train_files=rows.jsonl", "data.val_files=null",
    "reward.custom_reward_function.path=reward.py", "data.train_batch_size=4",
    "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_prompt_length=64", "data.max_response_length=4",
    "trainer.total_training_steps=2",
]  # fmt: skip
ON_GPUS = ["actor_rollout_ref.rollout.name=hf", "actor_rollout_ref.rollout.tensor_model_parallel_size=1",
           "trainer.n_gpus_per_node=1", "data.filter_overlong_prompts=false"]  # fmt: skip


@pytest.fixture
def here(workplace: Path) -> Path:
    tiny_model_dir("model")
    write_prompts("rows.jsonl", [{"prompt": f"{n}+1=", "reward_model": {"ground_truth": str(n + 1)}} for n in range(4)])
    Path("reward.py").write_text("def compute_score(solution_str, ground_truth):\n    return len(solution_str) / 4\n")
    return workplace


def test_help_is_short_and_loads_neither_torch_nor_hydra():
    code = (
        "import sys; from verl.cli.main import main; main(['--help']);"
        "print(sorted({'torch', 'hydra', 'omegaconf', 'transformers', 'ray', 'numpy', 'rich'} & {*sys.modules}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    *text, loaded = done.stdout.splitlines()
    assert loaded == "[]" and len(text) <= 60 and all(len(line) <= 120 for line in text)


@pytest.mark.parametrize("command", [*BY_REWARD, "sft", "dpo", "reward_model", "generate", "eval"])
def test_the_help_of_a_command_names_its_settings_in_60_lines(command):
    configuration = {"generate": "generation", "eval": "evaluation", "sft": "sft_trainer", "dpo": "dpo_trainer",
                     "reward_model": "rm_trainer"}.get(command, "ppo_trainer")  # fmt: skip
    text = program_help(command, configuration)
    assert len(text.splitlines()) <= 60
    assert all(f"\n{key}=" in text for key in SETTINGS[configuration])
    assert {*SETTINGS[configuration]} <= {*schema_of(program_of(configuration)[0].root).leaves}


@pytest.mark.parametrize("command", ["resume", "data", "doctor", "completion"])
def test_a_command_without_settings_has_one_line_of_help(command, capsys):
    (line,) = [f"verl {usage}: {meaning}\n" for usage, meaning in COMMANDS.items() if usage.split()[0] == command]
    for flag in ("--help", "-h"):
        assert main([command, flag]) == 0 and capsys.readouterr().out == line
        assert main([command, "rows.parquet", flag]) == 0 and capsys.readouterr().out == line


def test_a_deleted_working_directory_is_one_message(tmp_path):
    code = "import os; os.rmdir(os.getcwd()); from verl.cli.main import main; raise SystemExit(main())"
    words = [sys.executable, "-c", code, "train", "--config", "settings.yaml"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 2
    assert done.stderr == "error: the working directory was deleted. Change to one that exists: cd ~\n"


def test_the_command_finds_modules_of_the_working_directory(here):
    Path("my_callbacks.py").write_text("raise SystemExit('imported')\n")
    words = ["train", "grpo", *TINY, "trainer.checkpoint_callback_class=my_callbacks:Upload"]
    code = "import sys; sys.path.remove(''); from verl.cli.main import main; sys.exit(main())"
    done = subprocess.run([sys.executable, "-c", code, *words], capture_output=True, text=True, check=False)
    assert done.stderr.strip().endswith("imported"), done.stderr


def test_help_all_searches_names_and_meanings(capsys):
    assert main(["train", "grpo", "--help-all", "clip_ratio"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("actor_rollout_ref.actor.clip_ratio_high=") for line in lines) and len(lines) < 20
    assert main(["sft", "--help-all=nonsense"]) == 0
    assert "No setting has the word 'nonsense'" in capsys.readouterr().out


@pytest.mark.parametrize(
    "words, said",
    [
        (["trian"], "verl: unknown command. Got 'trian'."),
        (["train", "grpp"], "unknown method. Got 'grpp'."),
        (["train", "grpo", "--preset", "laptop"], "--preset: unknown preset. Got 'laptop'."),
        (["train", "grpo", "--preset", "quickstart", "--config", "a.yaml"], "one is given already"),
        (["train", "grpo", "--config"], "--config: the flag needs a value"),
        (["train", "grpo", "trainer.total_epoch=1"], "trainer.total_epoch"),
        (["resume", "nowhere"], "this folder holds no run"),
        (["resume"], "the folder of a run is needed"),
        (["generate", "--dry-run"], "--dry-run: only programs that train have this flag"),
        (["eval", "--preset", "quickstart"], "--preset: only programs that train have this flag"),
        (["data"], "a data file is needed"),
        (["completion", "tcsh"], "a shell is needed"),
        (["doctor", "now"], "the report takes no words"),
    ],
)
def test_what_is_wrong_is_one_message_and_status_2(here, capsys, words, said):
    assert main(words) == 2
    assert said in capsys.readouterr().err and not Path("runs").exists()


def test_a_run_ends_with_a_panel_and_is_resumed_by_its_folder(here, capsys):
    assert main(["train", *TINY]) == 0  # grpo
    (folder,) = Path("runs").iterdir()
    out = capsys.readouterr().out
    assert folder.name.startswith("grpo-") and "step:2 - " in out
    for said in (
        "metrics.jsonl",
        "curve.png",
        "global_step_2",
        "verl resume runs/grpo-",
        "verl generate model.path=",
        "data.path=prompts.jsonl rollout.prompt_length=64 rollout.response_length=4",
    ):
        assert said.replace(" ", "") in re.sub(r"[\s│]", "", out), said
    assert json.loads((folder / "run.json").read_text())["words"][0] == f"trainer.default_local_dir={folder}"
    record = (folder / "run.json").read_text()
    assert main(["resume", str(folder), "actor_rollout_ref.actor.optim.lr=1e-2"]) == 2
    assert (folder / "run.json").read_text() == record, "a refused resume changes what the next one reads"
    assert main(["resume", str(folder), "trainer.total_training_steps=3"]) == 0
    assert (folder / "global_step_3").is_dir() and len(list(Path("runs").iterdir())) == 1
    assert main(["plots", str(folder), "-o", "drawn.png"]) == 0 and Path("drawn.png").stat().st_size > 5000


@pytest.mark.parametrize("preset", sorted(file.stem for file in PRESETS.glob("*.yaml")))
def test_every_preset_passes_the_dry_run_which_writes_nothing(here, capsys, preset):
    before = sorted(here.rglob("*"))
    assert main(["train", "grpo", "--preset", preset, "--dry-run", *TINY, *ON_GPUS]) == 0
    out = capsys.readouterr().out
    assert "model: model" in out and "length: 2 steps" in out and out.endswith("the run can start.\n")
    assert sorted(here.rglob("*")) == before


def test_a_preset_shrunk_in_size_trains(here):
    assert main(["train", "grpo", "--preset", "quickstart", *TINY, "trainer.default_local_dir=small"]) == 0
    assert Path("small/global_step_2").is_dir()


def test_completion_offers_commands_methods_flags_and_settings():
    assert complete_word(["tr"]) == ["train"] and "grpo" in complete_word(["train", "g"])
    assert complete_word(["sft", "--d"]) == ["--dry-run"]
    assert complete_word(["train", "grpo", "actor_rollout_ref.ro"]) == ["actor_rollout_ref.rollout."]
    assert "optim.lr=" in complete_word(["sft", "optim.l"]) and complete_word(["nothing", "a"]) == []
    assert all("verl __complete" in script(shell) for shell in ("bash", "zsh", "fish"))
    done = subprocess.run(["bash", "-n"], input=script("bash"), text=True, capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_data_file_is_shown_with_the_commands_that_read_it(here, capsys):
    assert main(["data", "rows.jsonl"]) == 0
    out = capsys.readouterr().out
    assert "rows.jsonl: 4 rows" in out and "0+1=" in out and "read by: verl train, verl generate" in out
