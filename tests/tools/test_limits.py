"""A limit of the run on calls at once is shared out among the processes that run agent loops."""

from __future__ import annotations

import pytest

from verl.tools import limits
from verl.tools.search_tool import SearchTool


@pytest.mark.parametrize("processes, limit, share", [(1, 10, 10), (4, 10, 2), (4, 3, 1)])
def test_each_process_has_an_equal_part_and_at_least_one(monkeypatch, processes, limit, share):
    monkeypatch.setenv(limits.PROCESSES, "")
    limits.shared_by(processes)
    assert limits.share_of(limit) == share


def test_a_tool_that_asks_a_service_keeps_to_the_part_of_its_process(monkeypatch):
    monkeypatch.setenv(limits.PROCESSES, "8")
    tool = SearchTool({"retrieval_service_url": "http://localhost:1/retrieve", "rate_limit": 16})
    assert [tool._service._places.acquire(blocking=False) for _ in range(3)] == [True, True, False]
