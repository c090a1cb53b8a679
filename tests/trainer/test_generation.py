"""Batch generation: what is written, that a killed run goes on to the same file, and what is refused."""

from __future__ import annotations

import fcntl
import io
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from PIL import Image
from transformers import AutoModelForImageTextToText

from tests.harness.configs import changed
from tests.harness.models import tiny_model_dir, tiny_tokenizer
from tests.harness.rows import addition_rows, write_prompts
from tests.harness.vision import pictures, tiny_vision_dir
from verl.data.tokenizer import hf_tokenizer
from verl.data.vision.processor import load_processor
from verl.errors import ConfigError
from verl.metrics import notices
from verl.rollout import Completion, Sampler, SamplingParams
from verl.trainer import main_generation, main_generation_server
from verl.trainer.generation import Job, generate_file, model_identity
from verl.trainer.main_generation_server import split_output

ROWS = 12
KEYS = ["model.path=model", "data.path=prompts.parquet", "data.output_path=out.parquet", "data.n_samples=2",
        "rollout.response_length=6", "rollout.prompt_length=64", "trainer.device=cpu"]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    made = tmp_path_factory.mktemp("generation")
    tiny_model_dir(made / "model")
    write_prompts(made / "prompts.parquet", ROWS)
    return made


@pytest.fixture
def here(folder, monkeypatch):
    monkeypatch.chdir(folder)
    yield folder
    for file in folder.glob("out*"):
        file.unlink()


def run(*changes):
    return main_generation.main(changed(KEYS, *changes))


def responses(file="out.parquet"):
    return pq.read_table(file)["responses"].to_pylist()


def test_every_prompt_gets_its_answers_beside_its_own_columns(here):
    assert run() == 0
    table = pq.read_table("out.parquet")
    assert table.column_names == [*addition_rows(1)[0], "responses"] and len(table) == ROWS
    assert table.drop_columns(["responses"]).to_pylist() == addition_rows(ROWS)
    assert all(len(answers) == 2 for answers in responses()) and not list(here.glob("out.parquet.*"))
    assert len({answer for answers in responses() for answer in answers}) > ROWS


def test_the_answers_do_not_depend_on_how_many_prompts_are_worked_on_at_once(here):
    assert run("data.batch_size=1") == 0
    one = responses()
    assert run("data.batch_size=7") == 0
    assert responses() == one


def test_a_run_that_was_killed_goes_on_and_writes_what_a_whole_one_writes(here):
    assert run() == 0
    whole = responses()
    write_partial([["kept", "kept"]] * 5, tail='[7, ["cut off in the mid')
    assert run() == 0
    assert responses() == [["kept", "kept"]] * 5 + whole[5:]
    assert not Path("out.parquet.partial").exists()


def test_prompts_with_pictures_are_answered_as_transformers_answers_them(tmp_path, monkeypatch):
    """Two questions of equal text about different pictures, and one without; the likeliest tokens."""
    monkeypatch.chdir(tmp_path)
    folder = tiny_vision_dir(tmp_path / "sees")
    model = AutoModelForImageTextToText.from_pretrained(folder).eval()
    with torch.no_grad():
        for weight in model.parameters():
            weight.mul_(8 if weight.dim() > 1 else 1)  # the picture then decides on the likeliest token
    model.save_pretrained(folder)
    seen = [*pictures([(56, 56), (84, 56)]), None]
    rows = [{"prompt": [{"role": "user", "content": "<image>What?" if image else "What?"}],
              "images": [{"bytes": png(image)}] if image else []} for image in seen]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), "seen.parquet")
    words = ["model.path=sees", "data.path=seen.parquet", "rollout.do_sample=false", "rollout.ignore_eos=true"]
    assert main_generation.main(changed(KEYS, *words)) == 0
    tokenizer = hf_tokenizer(folder)
    processor = load_processor(folder, tokenizer)
    for image, answers in zip(seen, responses(), strict=True):
        inputs, pieces = processor.process([image] if image else [])
        content = [{"type": "image"}, {"type": "text", "text": "What?"}] if image else "What?"
        ask = [{"role": "user", "content": content}]
        text = tokenizer.apply_chat_template(ask, add_generation_prompt=True, tokenize=False)
        ids = torch.tensor([processor.expand(tokenizer(text)["input_ids"], pieces)])
        kinds = {"mm_token_type_ids": (ids == processor.placeholder_id).int()} if image else {}
        made = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), **inputs, **kinds, do_sample=False,
                              min_new_tokens=6, max_new_tokens=6)  # fmt: skip
        assert answers == [tokenizer.decode(made[0, ids.shape[1] :], skip_special_tokens=True)] * 2
    assert responses()[0] != responses()[1]


def png(image: Image.Image) -> bytes:
    file = io.BytesIO()
    image.save(file, format="PNG")
    return file.getvalue()


def write_partial(answers, tail=""):
    """What a run leaves behind that was killed after some prompts."""
    sampling = SamplingParams(temperature=1.0, top_p=0.7, top_k=50, max_tokens=6, stop_token_ids=(2,), seed=42)
    identity = {"model": model_identity("model"), "engine": "hf"}
    files = "prompts.parquet"
    job = Job(files, "out.parquet", 2, 128, sampling, max_prompt_length=64, identity=identity)
    fingerprint = job.fingerprint(pq.read_table(files))
    lines = [json.dumps(fingerprint), *(json.dumps([row, found]) for row, found in enumerate(answers))]
    Path("out.parquet.partial").write_text("\n".join(lines) + "\n" + tail)


def test_finished_prompts_are_not_asked_again(here):
    class Counting(Sampler):
        version, asked = 0, []

        async def generate(self, request):
            self.asked.append(request.uid)
            if len(self.asked) == 7:
                raise KeyboardInterrupt
            return Completion(request.id, (50,), (-0.1,), "stop", (0,))

        async def update_weights(self, chunks, version): ...

        async def abort(self, request_ids=None):
            return 0

        async def sleep(self, level=1): ...

        async def wake(self): ...

        def stats(self):
            return {}

    sampler = Counting()
    job = Job("prompts.parquet", "out.parquet", 1, 1, SamplingParams(max_tokens=4), max_prompt_length=64)
    with pytest.raises(KeyboardInterrupt):
        generate_file(job, sampler, tiny_tokenizer())
    generate_file(job, sampler, tiny_tokenizer())
    assert sampler.asked == [f"row {i}" for i in range(7)] + [f"row {i}" for i in range(6, ROWS)]
    assert len(responses()) == ROWS


@pytest.mark.parametrize(
    "damage",
    ["5", '"text"', '[3, "ab"]', '[3, ["a"]]', "[3, [1, 2]]", '[99, ["a", "b"]]',
     '[true, ["a", "b"]]', '["3", ["a", "b"]]',
     "\0" * 50, "[" * 100_000],
)  # fmt: skip
def test_a_line_that_was_damaged_is_left_out_and_its_prompt_answered_again(here, damage):
    assert run() == 0
    whole = responses()
    write_partial([["kept", "kept"]] * 3, tail=f'{damage}\n[4, ["kept", "kept"]]\n')
    assert run() == 0
    assert responses() == [["kept", "kept"]] * 3 + [whole[3], ["kept", "kept"]] + whole[5:]


def test_bytes_that_are_no_text_damage_their_line_only(here):
    write_partial([["kept", "kept"]] * 3)
    with Path("out.parquet.partial").open("ab") as file:
        file.write(b"\xff\xfe\n" + json.dumps([3, ["kept", "kept"]]).encode() + b"\n")
    assert run() == 0
    assert responses()[:4] == [["kept", "kept"]] * 4


@pytest.mark.parametrize("first", ["[]", "{", "\0\0"])
def test_answers_whose_settings_are_not_known_any_more_are_not_taken(here, capsys, first):
    write_partial([["a", "b"]] * 3)
    _, _, rest = Path("out.parquet.partial").read_text().partition("\n")
    Path("out.parquet.partial").write_text(f"{first}\n{rest}")
    assert run() == 2
    assert "the line with its settings is damaged" in capsys.readouterr().err
    assert Path("out.parquet.partial").read_text() == f"{first}\n{rest}"


def test_a_run_that_failed_before_its_first_answer_is_in_nobodys_way(here, capsys):
    assert run("rollout.response_length=100000") == 2
    assert "a prompt of 64 tokens and its response are longer than the sampler's context" in capsys.readouterr().err
    assert not Path("out.parquet.partial").exists()
    write_partial([])
    assert run("rollout.temperature=0.5") == 0


def test_other_prompts_under_the_same_name_are_not_mixed_with_answers_to_the_old_ones(here, capsys):
    table = pq.read_table("prompts.parquet")
    write_partial([["a", "b"]] * 3)
    try:
        pq.write_table(table.take(list(reversed(range(ROWS)))), "prompts.parquet")
        assert run() == 2
    finally:
        pq.write_table(table, "prompts.parquet")
    assert "another setting of prompts is stored next to the output" in capsys.readouterr().err


def test_other_weights_under_the_same_name_are_not_mixed_with_answers_of_the_old_ones(here, capsys):
    write_partial([["a", "b"]] * 3)
    weights = here / "model" / "model.safetensors"
    os.utime(weights, ns=(1, weights.stat().st_mtime_ns + 1))
    assert run() == 2
    assert "another setting of model is stored next to the output" in capsys.readouterr().err


def test_two_runs_do_not_write_one_output(here, capsys):
    write_partial([["a", "b"]] * 3)
    with Path("out.parquet.partial").open("a") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        assert run() == 2
    assert "another running job writes this file" in capsys.readouterr().err


def test_an_output_that_cannot_be_written_is_one_message(here, capsys):
    assert run("data.output_path=/proc/out.parquet") == 2
    assert "data.output_path: cannot be written" in capsys.readouterr().err
    Path("out.parquet").mkdir()
    try:
        assert run() == 2
    finally:
        Path("out.parquet").rmdir()
    assert "data.output_path: a folder has this name" in capsys.readouterr().err


def test_a_setting_that_batch_generation_has_no_use_for_gets_a_notice(here):
    assert run("rollout.over_sample_rate=0.5", "rollout.n=3", "rollout.top_p=0.9") == 0
    assert {"rollout.over_sample_rate", "rollout.n"} == {key for key, said in notices().items() if "no use" in said}


@pytest.mark.slow
def test_a_real_kill_in_the_middle_loses_nothing(here):
    assert run("rollout.response_length=100", "rollout.ignore_eos=true") == 0
    whole = responses()
    Path("out.parquet").unlink()
    command = [sys.executable, "-m", "verl.trainer.main_generation", *KEYS, "rollout.response_length=100",
               "rollout.ignore_eos=true", "data.batch_size=1"]  # fmt: skip
    command = [word for word in command if word != "rollout.response_length=6"]
    process = subprocess.Popen(command, env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])})
    partial, deadline = Path("out.parquet.partial"), time.monotonic() + 300
    while process.poll() is None and time.monotonic() < deadline:
        if partial.exists() and partial.read_bytes().count(b"\n") > 1:
            break  # the line with the settings, and one prompt
        time.sleep(0.005)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    assert partial.exists() and not Path("out.parquet").exists()
    assert run("rollout.response_length=100", "rollout.ignore_eos=true") == 0
    assert responses() == whole


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("data.path=nothing.parquet", "data.path: no such file"),
        ("data.prompt_key=question", "data.prompt_key"),
        ("data.output_path=out.csv", "data.output_path: is written as parquet"),
        ("data.output_path=nowhere/out.parquet", "data.output_path: no such folder"),
        ("data.n_samples=1000000", "data.n_samples: out of range"),
        ("data.n_samples=0", "data.n_samples: out of range"),
        ("rollout.response_length=1000000000", "longer than the sampler's context"),
        ("rollout.temperature=-1", "rollout.temperature: out of range"),
        ("rollout.max_num_seqs=0", "rollout.max_num_seqs: out of range"),
        ("rollout.top_k=-5", "rollout.top_k: out of range"),
        ("rollout.name=server", "rollout.name: needs the address of a server"),
        ("rollout.nam=hf", "rollout.name"),
        ("model.path=/nowhere", "model.path"),
    ],
)
def test_what_cannot_work_is_one_message_with_its_key(here, capsys, change, said):
    assert run(change) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize("name", ["max_attempts=0", "max_connections=0", "retry_delay=-1", "timeout=0"])
def test_requests_to_servers_that_could_never_be_made_are_refused_by_their_key(here, capsys, name):
    assert run("rollout.name=server", "rollout.server.url=http://127.0.0.1:9", f"rollout.server.{name}") == 2
    assert f"rollout.server.{name.partition('=')[0]}: out of range" in capsys.readouterr().err


def test_going_on_with_other_settings_is_refused(here, capsys):
    write_partial([["a", "b"]] * 3)
    assert run("rollout.temperature=0.5") == 2
    assert "an interrupted run with another setting of sampling is stored next to the output" in capsys.readouterr().err


def test_a_prompt_that_is_cut_is_told(here):
    assert run("rollout.prompt_length=20") == 0
    assert any("cut to 20 tokens" in said for said in notices().values())


def test_old_spellings_and_sections_that_train_are_taken_with_a_notice(here):
    assert run("actor.strategy=fsdp", "+rollout.tensor_parallel_size=1") == 0
    assert {"actor", "rollout.tensor_parallel_size"} <= set(notices())


def test_the_output_of_the_server_form_stands_on_the_command_line():
    assert split_output(["a=1", "+data.output_path=x.parquet"]) == ("x.parquet", ["a=1"])
    with pytest.raises(ConfigError, match=r"data.output_path: no such folder.*'nowhere'"):
        split_output(["data.output_path=nowhere/x.parquet"])
    for argv in (["a=1"], ["data.output_path=x.csv"]):
        with pytest.raises(ConfigError, match=r"data.output_path: names the parquet file"):
            split_output(argv)


@pytest.mark.slow
def test_the_server_form_sees_the_pictures_of_its_prompts(here):
    folder = tiny_vision_dir(here / "sees")
    rows = [{"prompt": [{"role": "user", "content": "<image>What?"}], "images": [{"bytes": png(image)}]}
            for image in pictures([(56, 56), (84, 56)])]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), "seen.parquet")
    R = "actor_rollout_ref.rollout"
    keys = [f"actor_rollout_ref.model.path={folder}", "data.train_files=seen.parquet", "data.max_prompt_length=64",
            "data.max_response_length=6", f"{R}.n=2", f"{R}.top_k=50", f"{R}.top_p=0.7"]  # fmt: skip
    assert main_generation_server.main([*keys, "trainer.device=cpu", "+data.output_path=out.parquet"]) == 0
    served = responses()
    assert run("model.path=sees", "data.path=seen.parquet") == 0
    assert responses() == served


@pytest.mark.slow
def test_the_server_form_starts_a_server_and_writes_the_same_answers(here, capsys):
    R = "actor_rollout_ref.rollout"
    keys = ["actor_rollout_ref.model.path=model", "data.train_files=prompts.parquet", "data.max_prompt_length=64",
            "data.max_response_length=6", f"{R}.n=2", f"{R}.top_k=50", f"{R}.top_p=0.7", "trainer.device=cpu",
            "data.truncation=left"]  # fmt: skip
    assert main_generation_server.main([*keys, "+data.output_path=out.parquet"]) == 0
    served = responses()
    assert run() == 0
    assert responses() == served
