"""Teachers behind vLLM's own servers: a step has the numbers of a teacher in a role, also when a server is killed."""

from __future__ import annotations

import os
import signal
from contextlib import ExitStack

import pytest
import torch

from tests.engines_real.vllm.test_in_process import TOLERANCE
from tests.engines_real.vllm.test_server import started
from tests.harness.rows import addition_rows
from tests.harness.runs import prepare, train
from tests.trainer.ppo.test_served_teachers import ON, L, described, teachers
from verl.errors import RolloutError
from verl.rollout.server.sampler import ServerSampler

pytestmark = pytest.mark.slow

LISTED = 16
TOP = (f"{L}.loss_mode=forward_kl_topk", f"{L}.topk={LISTED}")


@pytest.fixture(scope="module")
def servers(folder):
    """Two servers of one model, of which a test may kill the first."""
    with ExitStack() as stack:
        yield [stack.enter_context(started(folder, "--max-logprobs", str(LISTED))) for _ in range(2)]


def behind(folder, *servers, **settings):
    urls = ",".join(server.url for server in servers)
    words = [f"inference.server.{name}={value}" for name, value in settings.items()]
    return described("one", folder, "inference.name=server", f"inference.server.url=[{urls}]", *words)


def assert_same_step(served, in_role):
    mine, theirs = (seen.batches[0].tensors for seen in (served, in_role))
    assert torch.equal(mine["responses"], theirs["responses"])
    names = [name for name in theirs.keys() if name.startswith(("teacher_", "candidate_"))]
    assert names and set(names) <= set(mine.keys())
    for name in names:
        torch.testing.assert_close(mine[name], theirs[name], atol=TOLERANCE, rtol=0)
    loss, expected = (seen.metrics[0]["distillation/loss"] for seen in (served, in_role))
    assert loss == pytest.approx(expected, abs=TOLERANCE) and abs(expected) > 0.1


@pytest.mark.parametrize("mode", [(), TOP], ids=["k3", "most likely tokens"])
def test_a_teacher_on_vllm_gives_the_numbers_of_one_in_a_role(workplace, servers, folder, mode):
    prepare(rows=addition_rows(8))
    in_role = train(*ON, *mode, *described("one", folder))
    served = train(*ON, *mode, *behind(folder, servers[1]))
    assert_same_step(served, in_role)
    assert served.metrics[0]["distillation/requests/teacher_one"] == len(served.batches[0])


def test_more_listed_tokens_than_vllm_allows_end_the_run_at_its_start(workplace, servers, folder):
    prepare(rows=addition_rows(8))
    more = (TOP[0], f"{L}.topk={LISTED + 1}")
    with pytest.raises(RolloutError, match=rf"teacher_one(?s:.)*{LISTED + 1}(?s:.)*{LISTED}"):
        teachers(*more, *behind(folder, servers[1]))


def test_a_killed_vllm_server_of_a_teacher_changes_no_number(workplace, servers, folder, monkeypatch):
    """The first stops when it has rows, and is killed once the second has answered one."""
    prepare(rows=addition_rows(8))
    in_role = train(*ON, *described("one", folder))
    first, score = servers[0], ServerSampler.score

    async def watched(sampler, request):
        is_first, is_row = sampler.url == first.url, "step" in request.id
        if is_first and is_row and first.is_alive:
            os.kill(first.process.pid, signal.SIGSTOP)
        scores = await score(sampler, request)
        if is_row and not is_first and first.is_alive:
            os.kill(first.process.pid, signal.SIGKILL)
        return scores

    monkeypatch.setattr(ServerSampler, "score", watched)
    served = train(*ON, *behind(folder, *servers))
    assert_same_step(served, in_role)
    assert not first.is_alive and served.metrics[0]["distillation/retries/teacher_one"] >= 1
