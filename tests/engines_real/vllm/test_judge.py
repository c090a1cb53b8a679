"""A judge on vLLM: its answers are those of the model, and a server that is killed costs a wait and nothing else."""

from __future__ import annotations

import os
import signal

import pytest

from tests.harness.served_judges import greedy_reply, judges_over, question, reply_of
from tests.harness.waiting import wait_until

pytestmark = pytest.mark.slow


def test_a_judge_on_vllm_answers_before_and_after_its_server_is_killed(folder):
    judges = judges_over(folder, name="vllm", max_num_seqs=8)
    judges.start("cpu")
    try:
        expected = greedy_reply(folder, "grade 7")
        assert reply_of(question(judges.address, "grade 7")) == expected
        os.kill(judges._processes[0].process.pid, signal.SIGKILL)
        wait_until(lambda: judges.restarts == 1)
        assert reply_of(question(judges.address, "grade 7")) == expected
    finally:
        judges.close()
