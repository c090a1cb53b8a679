"""Teachers behind servers give the numbers of teachers in roles, also when a server is killed in mid-step."""

from __future__ import annotations

import os
import signal

import numpy as np
import psutil
import pytest
import torch

from tests.harness.configs import changed
from tests.harness.models import tiny_model_dir
from tests.harness.prompt_log_probs import vllm_answer
from tests.harness.rows import addition_rows
from tests.harness.runs import COMMON, prepare, train
from tests.harness.servers import serving
from tests.harness.waiting import wait_until
from verl.config import load_config
from verl.errors import NotBuiltError, RolloutError
from verl.metrics import MetricSet
from verl.models import load_causal_lm
from verl.outcomes import run_now
from verl.protocol import DataProto
from verl.rollout.server.process import HostProcess
from verl.rollout.server.sampler import ServerSampler
from verl.trainer.models import served_models
from verl.trainer.ppo.callbacks import Callback
from verl.workers.served_teachers import ServedTeachers

T, L = "distillation.teacher_models", "distillation.distillation_loss"
ON = ("distillation.enabled=true", "actor_rollout_ref.actor.optim.lr=1e-3")
EXACT = (f"{L}.loss_mode=forward_kl_topk", f"{L}.topk=259")
KEY = "TEACHER_KEY"


@pytest.fixture
def run(workplace):
    rows = [{**row, "data_source": ("sums", "poems")[n % 2]} for n, row in enumerate(addition_rows(8))]
    prepare(rows=rows)
    tiny_model_dir("first", seed=5, initializer_range=0.2)
    tiny_model_dir("second", seed=6, initializer_range=0.2)
    return workplace


@pytest.fixture
def hosts(run, monkeypatch):
    """Addresses of hosts of both models, which share a key."""
    monkeypatch.setenv(KEY, "the key of these tests")
    words = [f"actor_rollout_ref.model.path={run}/{name}" for name in ("first", "second")]
    started = [HostProcess([word], "cpu", word, key="the key of these tests") for word in words]
    try:
        for process in started:
            run_now(process.wait_until_up(300))
        yield [process.url for process in started]
    finally:
        for process in started:
            process.close()


def log_probs(seen):
    """(B, T) of the sampled tokens, or (B, T, V) by token where every token is listed."""
    tensors = seen.batches[0].tensors
    if "teacher_log_probs" in tensors.keys():
        return tensors["teacher_log_probs"]
    listed = tensors["candidate_teacher_log_probs"]
    return torch.zeros_like(listed).scatter(-1, tensors["candidate_ids"].long(), listed)


def described(name, path, *more):
    return (f"+{T}.{name}.model_path={path}", *(f"+{T}.{name}.{word}" for word in more))


def at(url):
    return ("inference.name=server", f"inference.server.url={url}", f"inference.server.api_key_env={KEY}")


@pytest.mark.slow
@pytest.mark.parametrize("mode", [(), EXACT], ids=["k3", "every token"])
def test_served_teachers_give_the_numbers_of_teachers_in_roles(run, hosts, mode):
    sums, poems = ("key=sums",), ("key=poems",)
    in_roles = train(*ON, *mode, *described("sums", "first", *sums), *described("poems", "second", *poems))
    served = train(
        *ON,
        *mode,
        *described("sums", "first", *sums, *at(hosts[0])),
        *described("poems", "second", *poems, *at(hosts[1])),
    )
    assert log_probs(in_roles).abs().max() > 1
    torch.testing.assert_close(log_probs(served), log_probs(in_roles), atol=1e-5, rtol=0)
    assert served.metrics[0]["distillation/loss"] == pytest.approx(in_roles.metrics[0]["distillation/loss"], abs=1e-5)
    assert served.metrics[0]["actor/grad_norm"] == pytest.approx(in_roles.metrics[0]["actor/grad_norm"], rel=1e-4)
    for name in ("sums", "poems"):
        rows = served.metrics[0][f"distillation/rows/teacher_{name}"]
        assert served.metrics[0][f"distillation/requests/teacher_{name}"] == rows > 0
        assert served.metrics[0][f"distillation/retries/teacher_{name}"] == 0
    assert "teacher_sums" in in_roles.trainer.roles and "teacher_sums" not in served.trainer.roles


class Killer(Callback):
    """Kills the first server once the second has answered a row of step 1, while the first has rows and is stopped."""

    def __init__(self, monkeypatch):
        self.answered: list[tuple[str, str]] = []
        self.processes: list[psutil.Process] = []
        self.killed = False
        score, killer = ServerSampler.score, self

        async def watched(sampler, request):
            if "step 1" in request.id:
                killer.stop_first(sampler.url)
            scores = await score(sampler, request)
            if "step" in request.id:
                killer.answered.append((request.id, sampler.url))
                killer.kill_first(sampler.url)
            return scores

        monkeypatch.setattr(ServerSampler, "score", watched)

    def on_fit_begin(self, trainer):
        [pool] = trainer.teachers._pools.values()
        self.hosts = pool.replicas
        self.first = self.hosts[0].process
        self.processes = [psutil.Process(host.process.process.pid) for host in self.hosts]

    def stop_first(self, url):
        if url == self.first.url and not self.killed:
            os.kill(self.first.process.pid, signal.SIGSTOP)

    def kill_first(self, url):
        if url != self.first.url and not self.killed:
            self.killed = True
            os.kill(self.first.process.pid, signal.SIGKILL)

    def on_step_end(self, trainer, batch):
        wait_until(lambda: self.hosts[0].mending() is None)
        self.processes.append(psutil.Process(self.hosts[0].process.process.pid))


@pytest.mark.slow
def test_a_killed_server_changes_no_number_and_is_started_again(run, monkeypatch):
    steps = (*ON, "trainer.total_training_steps=2", "data.shuffle=false")
    quiet = train(*steps, *described("one", "first"))
    killer = Killer(monkeypatch)
    hit = train(*steps, *described("one", "first", "num_replicas=2"), watch=killer)
    for mine, theirs in zip(hit.batches, quiet.batches):
        assert torch.equal(mine.tensors["responses"], theirs.tensors["responses"])
        torch.testing.assert_close(
            mine.tensors["teacher_log_probs"], theirs.tensors["teacher_log_probs"], atol=1e-5, rtol=0
        )
    first, second = hit.metrics
    assert first["actor/grad_norm"] == pytest.approx(quiet.metrics[0]["actor/grad_norm"], rel=1e-4)
    assert killer.killed and first["distillation/retries/teacher_one"] >= 1
    assert first["distillation/requests/teacher_one"] == 16 + first["distillation/retries/teacher_one"]
    assert sum(step["distillation/restarts/teacher_one"] for step in (first, second)) == 1
    assert second["distillation/retries/teacher_one"] == 0
    urls = {url for row, url in killer.answered if "step 2" in row}
    assert urls == {host.process.url for host in killer.hosts} and killer.first.url not in urls
    wait_until(lambda: not any(process.is_running() for process in killer.processes), "a server outlives its run")


def teachers(*words):
    config = load_config("ppo_trainer", changed(COMMON, *ON, *words))
    return ServedTeachers(config, served_models(config), "cpu")


def batch(**columns):
    """Two rows of three prompt and two response tokens; the second has one token of padding on either side."""
    ids = torch.tensor([[40, 41, 42, 43, 44], [0, 45, 46, 47, 0]])
    tensors = {
        "input_ids": ids,
        "attention_mask": torch.tensor([[1, 1, 1, 1, 1], [0, 1, 1, 1, 0]]),
        "responses": ids[:, 3:],
        "response_mask": torch.tensor([[1, 1], [1, 0]]),
    }
    return DataProto.from_dict(tensors, non_tensors=columns)


def infer(served, rows):
    metrics = MetricSet()
    return served.infer("teacher_math", rows, ["row 5 of step 4", "row 9 of step 4"], metrics), metrics.values()


def test_columns_hold_the_log_probs_where_tokens_are_trained_on(run):
    model = load_causal_lm("first", torch.float32).eval()
    with serving({"/v1/completions": lambda payload: vllm_answer(model, payload)}) as server:
        served = teachers(*described("math", "first", "inference.name=server", f"inference.server.url={server.url}"))
        columns, metrics = infer(served, batch())
        rows = server.payloads("/v1/completions")[1:]
    assert [row["prompt"] for row in rows] == [[40, 41, 42, 43, 44], [45, 46, 47]]
    with torch.no_grad():
        first, second = (model(input_ids=torch.tensor([row["prompt"]])).logits[0].log_softmax(-1) for row in rows)
    expected = torch.tensor([[first[2, 43], first[3, 44]], [second[1, 47], 0.0]])
    torch.testing.assert_close(columns["log_probs"], expected)
    assert metrics["distillation/requests/teacher_math"] == 2 and metrics["distillation/seconds/teacher_math"] > 0


def test_an_answer_that_cannot_be_used_names_teacher_server_and_row(run):
    model = load_causal_lm("first", torch.float32).eval()

    def answer(payload):
        status, content = vllm_answer(model, payload)
        if payload["prompt"][-1] == 47:
            content["choices"][0]["prompt_logprobs"][-1]["47"]["logprob"] = None
        return status, content

    with serving({"/v1/completions": answer}) as server:
        served = teachers(*described("math", "first", "inference.name=server", f"inference.server.url={server.url}"))
        with pytest.raises(RolloutError) as caught:
            infer(served, batch())
    said = str(caught.value)
    assert "the teacher teacher_math" in said and server.url in said and "row 9 of step 4" in said
    assert "a log-prob of null" in said and f"{T}.math" in said


def test_rows_with_images_are_refused_by_name(run):
    model = load_causal_lm("first", torch.float32).eval()
    with serving({"/v1/completions": lambda payload: vllm_answer(model, payload)}) as server:
        served = teachers(*described("math", "first", "inference.name=server", f"inference.server.url={server.url}"))
        pictures = np.array([{"pixel_values": torch.zeros(1)}, None], dtype=object)
        with pytest.raises(NotBuiltError, match=r"teacher_math.*images or videos.*teacher in a role"):
            infer(served, batch(multi_modal_inputs=pictures))


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        ((400, {"error": {"message": "greater than max allowed: 20"}}), "greater than max allowed: 20"),
        ((404, {"detail": "Not Found"}), "refuses the request (404)"),
        (lambda payload: (200, {"choices": [{"text": "x"}]}), "it has no prompt_logprobs"),
    ],
)
def test_a_server_without_prompt_log_probs_ends_the_run_before_it_samples(run, answer, says):
    with serving({"/v1/completions": answer}) as server, pytest.raises(RolloutError) as caught:
        teachers(*described("math", "first", "inference.name=server", f"inference.server.url={server.url}"))
    assert says in str(caught.value) and "teacher_math" in str(caught.value) and server.url in str(caught.value)


@pytest.mark.slow
def test_a_host_that_does_not_come_up_ends_the_run_with_its_last_words(run):
    (run / "first" / "config.json").write_text('{"model_type": "qwen2", "vocab_size": 259, "hidden_size": "wide"}')
    with pytest.raises(RolloutError, match=r"(?s)teacher_math, server 0 ended with status 2.*cannot be loaded"):
        teachers(*described("math", "first", "num_replicas=1"))
