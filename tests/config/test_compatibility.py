"""How many of upstream's recorded commands resolve only rises."""

from __future__ import annotations

from pathlib import Path

import pytest

from scripts import compatibility, recording

FLOORS = {"examples and tests": 74, "recipes": 36}
"""Scripts that resolve, those with images among them; who brings one up writes the higher number here."""

FLOOR_WITH_IMAGES = 21


@pytest.fixture(scope="module")
def results(shared: Path):
    commands = compatibility.read_commands(shared / "migration" / "commands.jsonl")
    return compatibility.verdicts(commands, every_reason=False)


def test_no_fewer_of_upstreams_commands_resolve_than_before(results):
    resolved = dict.fromkeys(FLOORS, 0)
    for verdict in results:
        resolved[verdict.category.partition(",")[0]] += not verdict.reasons
    assert all(resolved[name] >= floor for name, floor in FLOORS.items()), resolved


def test_commands_with_images_resolve_or_are_refused_by_name(results):
    seen = [verdict for verdict in results if verdict.category.endswith("with images")]
    assert sum(not verdict.reasons for verdict in seen) >= FLOOR_WITH_IMAGES
    assert {reason.kind for verdict in seen for reason in verdict.reasons} <= {"not built", "a relation or a value"}


def test_no_key_of_upstreams_tree_is_unknown(results):
    unknown = {reason.name for verdict in results for reason in verdict.reasons if reason.kind == "unknown key"}
    assert unknown == set()


def test_every_program_of_upstream_is_a_module(results):
    missing = {reason.name for verdict in results for reason in verdict.reasons if reason.kind == "module missing"}
    assert {name for name in missing if name.startswith(("verl.", "recipe."))} == set()


def script(*argv, program="verl.trainer.main_ppo"):
    return {"script": "examples/one.sh", "commands": [{"program": program, "argv": list(argv)}]}


def test_every_reason_is_found_though_one_hides_the_others():
    words = ("model_engine=veomni", "actor_rollout_ref.model.mtp.enable=true", "no.such.key=1", "algorithm.gamma=2")
    (verdict,) = compatibility.verdicts([script(*words)])
    kinds = {(reason.kind, reason.name.partition(":")[0]) for reason in verdict.reasons}
    assert ("not built", "multi-token prediction") in kinds and ("a relation or a value", "algorithm.gamma") in kinds
    assert any(kind == "unknown key" for kind, _ in kinds) and any("veomni" in name for _, name in kinds)
    assert verdict.engine == "veomni" and verdict.category == "examples and tests"
    rows = {reason.name: (count, alone) for reason, count, alone in compatibility.blockers([verdict])}
    assert rows["multi-token prediction"] == (1, 0)


def test_a_command_resolves_without_its_files_and_a_missing_program_is_counted():
    good = script("data.train_files=@HOME/no/train.parquet", "actor_rollout_ref.model.path=/no/model")
    images = script("data.image_key=images", program="verl.trainer.no_such_program")
    resolved, missing = compatibility.verdicts([good, images])
    assert resolved.reasons == {}
    assert [reason.kind for reason in missing.reasons] == ["module missing"]
    assert missing.category == "examples and tests, with images"
    assert "| all | 2 | 1 | 0 | 0 | 1 |" in compatibility.report([resolved, missing])


def test_recording_runs_scripts_with_stand_ins_and_keeps_facts_alone(tmp_path):
    scripts = tmp_path / "examples" / "a"
    scripts.mkdir(parents=True)
    (tmp_path / "verl").mkdir()
    (scripts / "run.sh").write_text(
        "N=$(python3 -c 'print(1)')\nray start --head\nrm -rf $HOME; mkdir made\n"
        "python3 -m verl.trainer.main_ppo model=$HOME/m \"files=['a b']\" $@\n"
        "for lr in 1 2; do torchrun --nproc_per_node=8 -m verl.trainer.sft_trainer lr=$lr; done\n"
        'ray job submit -- python3 -m recipe.b.main x="$(pwd)/y"\npython recipe/b/prog.py --z\n'
    )
    (scripts / "nothing.sh").write_text("echo hello\n")
    (recorded,) = recording.record(tmp_path)
    assert recorded["script"] == "examples/a/run.sh"
    assert [(c["program"], c["argv"]) for c in recorded["commands"]] == [
        ("verl.trainer.main_ppo", ["model=@HOME/m", "files=['a b']"]),
        ("verl.trainer.sft_trainer", ["lr=1"]),
        ("verl.trainer.sft_trainer", ["lr=2"]),
        ("recipe.b.main", ["x=@UPSTREAM/y"]),
        ("recipe.b.prog", ["--z"]),
    ]
    assert not (tmp_path / "made").exists()


def test_a_folder_that_is_no_checkout_is_refused(tmp_path, capsys):
    assert recording.main(tmp_path) == 2 and "no checkout" in capsys.readouterr().err


def test_a_configuration_file_that_no_recording_holds_is_named_as_that():
    (verdict,) = compatibility.verdicts([script("--config-path=recipe/mine", "--config-name=mine")])
    ((kind, name),) = [(reason.kind, reason.name) for reason in verdict.reasons]
    assert kind == "not recorded" and "a configuration file of the script's own" in name


def test_a_page_that_is_written_anew_keeps_what_it_says_of_upstreams_checkout(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(compatibility, "PAGE", tmp_path / "page.md")
    monkeypatch.setattr(compatibility, "ROOT", tmp_path)
    (tmp_path / "none.jsonl").touch()
    for words, says in (([], "not recorded"), (["--commit", "its main of May. 1"], "its main of May. 1")):
        for more in (words, []):
            assert compatibility.main([str(tmp_path / "none.jsonl"), "--write", *more]) == 0
            assert f"; upstream's checkout: {says}.\n" in (tmp_path / "page.md").read_text()


def test_the_page_counts_scripts_that_start_workers_by_uv():
    good = script("trainer.total_epochs=2")
    by_uv = script("+ray_kwargs.ray_init.runtime_env.py_executable='uv run --frozen'")
    results = compatibility.verdicts([good, by_uv])
    assert [verdict.reasons for verdict in results] == [{}, {}]
    page = compatibility.page(results, "main")
    assert "\n2 of 2 recorded scripts resolve" in page and "1 of the scripts that resolve start" in page
    assert "there 1 resolve" in page
