"""The search tool against a small real retrieval service."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator

import pytest

from tests.harness.sandbox_service import HttpService, serving
from verl.errors import ConfigError
from verl.sandbox import service as service_module
from verl.tools.search_tool import SearchTool

TEXTS = {"capital of France": '"Paris"\nParis is the capital of France.', "river": '"Seine"\nThe Seine flows.'}


def retrieve(question: dict) -> dict:
    """Passages whose key shares a word with the query, as Search-R1's service answers."""
    found = []
    for query in question["queries"]:
        hits = [text for key, text in TEXTS.items() if set(key.split()) & set(query.split())]
        found.append([{"document": {"id": "1", "contents": text}, "score": 0.5} for text in hits[: question["topk"]]])
    return {"result": found}


@pytest.fixture
def http(monkeypatch: pytest.MonkeyPatch) -> Iterator[HttpService]:
    monkeypatch.setattr(service_module, "FIRST_PAUSE", 0.01)
    with serving(retrieve) as running:
        yield running


def call(http: HttpService, parameters: dict, **config) -> tuple[str, dict]:
    tool = SearchTool({"type": "native", "retrieval_service_url": http.url + "/retrieve", **config})

    async def one() -> tuple[str, dict]:
        name, _ = await tool.create()
        answer, reward, metrics = await tool.execute(name, parameters)
        assert reward is None
        return answer.text or "", metrics

    return asyncio.run(one())


def test_passages_come_back_with_their_titles(http: HttpService):
    text, metrics = call(http, {"query_list": ["capital of France", "river", "nothing"]}, topk=2)
    assert text == (
        "Doc 1 (Title: Paris)\nParis is the capital of France.\n\n"
        "Doc 1 (Title: Seine)\nThe Seine flows.\n\nNo passage was found."
    )
    assert metrics == {"error": 0.0, "queries": 3.0, "passages": 2.0}
    assert http.asked == [{"queries": ["capital of France", "river", "nothing"], "topk": 2, "return_scores": True}]
    assert http.paths == ["/retrieve"]


def test_one_query_may_come_alone_and_as_text(http: HttpService):
    assert "Seine" in call(http, {"query": "river"})[0]
    assert "Seine" in call(http, {"query_list": "river"})[0]


@pytest.mark.parametrize(
    "parameters", [{}, {"query_list": []}, {"query_list": [1]}, {"query_list": None}, {"query": {}}]
)
def test_arguments_that_are_no_queries_become_a_message(http: HttpService, parameters: dict):
    assert call(http, parameters) == ('Error: "query_list" has to be a list of texts', {"error": 1.0})
    assert http.asked == []


def test_floods_of_queries_and_endless_queries_are_cut(http: HttpService):
    assert call(http, {"query_list": ["x"] * 33})[0] == "Error: at most 32 queries at once"
    call(http, {"query_list": ["y" * 100_000]})
    assert len(http.asked[-1]["queries"][0]) == 2000


@pytest.mark.parametrize("trouble", [500, 403, b"not json", "half", "reset", b'{"result": 5}', b'{"result": []}'])
def test_a_service_in_trouble_is_a_message_without_its_address(http: HttpService, trouble):
    http.script = [trouble] * 3
    text, metrics = call(http, {"query_list": ["river"]}, timeout=5.0)
    assert text.startswith("Error: the search service") and "127.0.0.1" not in text
    assert metrics == {"error": 1.0}


def test_trouble_that_passes_is_not_seen_by_the_model(http: HttpService):
    http.script = [503, "reset"]
    assert "Seine" in call(http, {"query_list": ["river"]})[0]


@pytest.mark.parametrize(
    "entry", [None, 5, "plain text", {"contents": "plain text"}, {"document": None}, {"document": {}}]
)
def test_passages_of_other_forms_are_read_or_left_out(http: HttpService, entry):
    http.answer = lambda _: {"result": [[entry]]}
    text, _ = call(http, {"query_list": ["river"]})
    assert text in ("Doc 1\nplain text", "No passage was found.")
    assert ("plain text" in text) == ("plain text" in str(entry))


def test_an_address_in_a_query_is_only_a_query(http: HttpService):
    """What a model writes is never an address: neither this machine's nor another's."""
    for hostile in ("http://169.254.169.254/latest", "file:///etc/passwd", "http://127.0.0.1:22", "../../retrieve"):
        call(http, {"query_list": [hostile], "retrieval_service_url": hostile, "url": hostile})
    assert set(http.paths) == {"/retrieve"} and len(http.asked) == 4


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({}, "retrieval_service_url: is missing"),
        ({"retrieval_service_url": "host"}, "not the address of a service"),
        ({"retrieval_service_url": "http://h", "top_k": 3}, r"unknown setting.*Did you mean 'topk'"),
        ({"retrieval_service_url": "http://h", "topk": 0}, "must be positive"),
        ({"retrieval_service_url": "http://h", "topk": "3"}, "has the wrong type"),
    ],
)
def test_a_wrong_configuration_is_found_when_the_tool_is_loaded(config: dict, says: str):
    with pytest.raises(ConfigError, match=says):
        SearchTool(config)
