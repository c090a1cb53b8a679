"""One place for versions; a wheel that works outside the checkout; containers made from the same pins."""

from __future__ import annotations

import importlib.metadata
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import zipfile
from pathlib import Path

import pytest

from tests.harness.models import tiny_model_dir
from tests.sanity.source_tree import ROOT, read_toml, tracked_files


def pins(name: str = "constraints.txt") -> dict[str, str]:
    lines = (ROOT / name).read_text(encoding="utf-8").splitlines()
    return dict(line.split("==") for line in lines if line and not line.startswith("#"))


def canonical(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """A wheel built from a copy of the tracked files, so that nothing is left in the checkout."""
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for path in tracked_files():
        relative = path.relative_to(ROOT)
        if relative.parts[0] == "verl" or len(relative.parts) == 1:
            (source / relative).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, source / relative)
    command = ["pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index", "-w", str(out), str(source)]
    done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    return next(out.glob("verl-*.whl"))


def test_the_wheel_holds_the_whole_package_and_nothing_else(wheel):
    names = {n for n in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in n}
    wanted = {str(p.relative_to(ROOT)) for p in tracked_files() if p.relative_to(ROOT).parts[0] == "verl"}
    assert names == wanted
    assert any(n.endswith("licenses/LICENSE") for n in zipfile.ZipFile(wheel).namelist())


def test_the_wheel_works_outside_the_checkout(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    elsewhere.mkdir()
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}
    code = "import verl, verl.config; print(verl.__file__)"
    where = subprocess.run(
        [sys.executable, "-c", code], cwd=elsewhere, env=environment, capture_output=True, text=True, check=True
    ).stdout
    assert where.startswith(str(site))
    done = subprocess.run(
        [sys.executable, "-m", "verl.trainer.main_ppo", "--cfg", "job"],
        cwd=elsewhere, env=environment, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0 and "actor_rollout_ref:" in done.stdout, done.stderr[-2000:]


@pytest.mark.slow
def test_the_command_of_the_wheel_trains_resumes_and_draws_outside_the_checkout(wheel, tmp_path):
    site, elsewhere = tmp_path / "site", tmp_path / "elsewhere"
    zipfile.ZipFile(wheel).extractall(site)
    tiny_model_dir(elsewhere / "model")
    (elsewhere / "rows.jsonl").write_text('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}\n' * 4)
    (elsewhere / "reward.py").write_text("def score(solution_str, ground_truth):\n    return len(solution_str)\n")
    environment = {**os.environ, "PYTHONPATH": str(site), "PYTHONSAFEPATH": "1"}

    def verl(*words):
        command = [sys.executable, "-m", "verl", *words]
        done = subprocess.run(command, cwd=elsewhere, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
        return done.stdout

    settings = ["actor_rollout_ref.model.path=model", "data.train_files=rows.jsonl", "data.val_files=null",
                "reward.custom_reward_function.path=reward.py", "data.train_batch_size=4", "data.max_prompt_length=64",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_response_length=4"]  # fmt: skip
    assert "the run can start" in verl("train", "grpo", "--preset", "quickstart", "--dry-run", *settings)
    verl("train", "grpo", *settings, "trainer.total_training_steps=1")
    (run,) = (elsewhere / "runs").iterdir()
    verl("resume", str(run.relative_to(elsewhere)), "trainer.total_training_steps=2")
    assert (run / "global_step_2/actor/huggingface/model.safetensors").is_file()
    assert verl("plots", str(run), "-o", "drawn.png").strip() == "drawn.png" and (elsewhere / "drawn.png").is_file()
    assert str(site) in verl("doctor")


@pytest.mark.slow
def test_a_plain_install_trains_and_names_the_extra_of_what_it_lacks(tmp_path):
    """All packages of this environment but those that only extras bring."""
    slim = tmp_path / "slim"
    slim.mkdir()
    extras = ("ray", "matplotlib", "mpl_toolkits", "tensorboard", "grpc")
    for entry in Path(sysconfig.get_path("purelib")).iterdir():
        if (
            entry.suffix != ".pth"
            and not entry.name.startswith("__editable__")
            and entry.name.split("-")[0] not in extras
        ):
            (slim / entry.name).symlink_to(entry)
    tiny_model_dir(tmp_path / "model")
    (tmp_path / "rows.jsonl").write_text('{"prompt": "1+1=", "reward_model": {"ground_truth": "2"}}\n' * 4)
    (tmp_path / "reward.py").write_text("def score(solution_str, ground_truth):\n    return len(solution_str)\n")

    def verl(*words):
        environment = {**os.environ, "PYTHONPATH": f"{slim}:{ROOT}"}
        command = [sys.executable, "-S", "-m", "verl", *words]
        return subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)

    settings = ["actor_rollout_ref.model.path=model", "data.train_files=rows.jsonl", "data.train_batch_size=4",
                "reward.custom_reward_function.path=reward.py", "data.max_prompt_length=64",
                "actor_rollout_ref.actor.ppo_mini_batch_size=4", "data.max_response_length=4",
                "trainer.total_training_steps=1"]  # fmt: skip
    done = verl("train", "grpo", *settings)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    (run,) = (tmp_path / "runs").iterdir()
    for install, words in (
        ("-e '.[plots]'", ["plots", str(run)]),
        ("-e '.[ray]'", ["train", "grpo", *settings, "trainer.runtime=ray"]),
        ("tensorboard", ["train", "grpo", *settings, "trainer.logger=[tensorboard]"]),
    ):
        refused = verl(*words)
        assert refused.returncode == 2 and f"pip install {install}" in refused.stderr + refused.stdout, refused


def test_the_pins_satisfy_the_ranges_of_the_package():
    from packaging.requirements import Requirement

    project = read_toml(ROOT / "pyproject.toml")["project"]
    tested = {canonical(name): version for name, version in pins().items()}
    wanted = [Requirement(r) for r in project["dependencies"] + project["optional-dependencies"]["dev"]]
    missing = [r.name for r in wanted if canonical(r.name) not in tested]
    assert not missing, f"no pin in constraints.txt for {missing}"
    outside = [
        f"{r} but pinned {tested[canonical(r.name)]}" for r in wanted if tested[canonical(r.name)] not in r.specifier
    ]
    assert not outside, outside


def test_both_environments_fit_the_same_torch_and_transformers_ranges():
    from packaging.requirements import Requirement

    ranges = {r.name: r for r in map(Requirement, read_toml(ROOT / "pyproject.toml")["project"]["dependencies"])}
    for name in ("torch", "transformers"):
        for file in ("constraints.txt", "constraints-vllm.txt"):
            assert pins(file)[name] in ranges[name].specifier, f"{name} of {file}"


def test_the_extras_are_those_that_the_documentation_names():
    extras = set(read_toml(ROOT / "pyproject.toml")["project"]["optional-dependencies"])
    assert extras >= {"vllm", "sglang", "megatron", "math", "liger", "wandb", "mlflow", "swanlab", "mcp", "dev"}
    assert "verl" not in extras and importlib.metadata.version("setuptools")


@pytest.mark.parametrize("name", ["cpu", "cuda-vllm", "cuda-sglang", "rocm"])
def test_containers_take_their_versions_from_the_constraints(name):
    text = (ROOT / "docker" / f"Dockerfile.{name}").read_text(encoding="utf-8")
    assert re.search(r"constraints(-vllm)?\.txt", text)
    assert not re.search(r"\b(torch|transformers|vllm)==\d", text), "a version is written twice"


def test_torch_is_pinned_once_and_the_makefile_reads_that_pin():
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert "/^torch==/p" in makefile and not re.search(r"torch==\d", makefile)
    assert pins()["torch"] == "2.13.0"
