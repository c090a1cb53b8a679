"""Search as a tool: queries go to a retrieval service over HTTP, and the passages come back as text.

The service is the one that Search-R1 made common: ``POST {queries, topk, return_scores}``, answered by
``{"result": [[{"document": {"contents": ...}, "score": ...}, ...], ...]}``, one list per query.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from verl.errors import ConfigError
from verl.sandbox.service import Service, ServiceError
from verl.tools.base import BaseTool, Executed
from verl.tools.limits import share_of
from verl.tools.runner import in_thread
from verl.tools.schemas import OpenAIFunctionToolSchema, ToolResponse
from verl.tools.settings import read_settings

SCHEMA = {
    "type": "function",
    "function": {
        "name": "search",
        "description": "Searches a collection of texts and returns the passages that fit each query best.",
        "parameters": {
            "type": "object",
            "properties": {
                "query_list": {
                    "type": "array",
                    "items": {"type": "string"},
                    "description": "The queries; each is searched for by itself.",
                }
            },
            "required": ["query_list"],
        },
    },
}
DEFAULTS: dict[str, Any] = {
    "retrieval_service_url": None,
    "topk": 3,
    "timeout": 30.0,
    "num_workers": 120,
    "rate_limit": 120,
}
MOST_QUERIES, LONGEST_QUERY, LONGEST_PASSAGE = 32, 2000, 20_000
NOTHING = "No passage was found."


class SearchTool(BaseTool):
    """Searches for the argument ``query_list`` (or one ``query``).

    ``config``: ``retrieval_service_url`` (must be there), ``topk`` passages per query, ``timeout`` in seconds for a
    call with all its attempts, ``num_workers`` and ``rate_limit``, the smaller of which is the most requests at once
    in the run.

    A service that does not answer gives the model a message, and the call the metric ``error`` 1.
    """

    def __init__(
        self, config: Mapping[str, Any] | None, tool_schema: OpenAIFunctionToolSchema | Mapping[str, Any] | None = None
    ):
        super().__init__(config, tool_schema)
        self._settings = settings = read_settings(self.name, self.config, DEFAULTS)
        key = f"{self.name}.config.retrieval_service_url"
        if not settings["retrieval_service_url"]:
            raise ConfigError("is missing", key=key, allowed="http://host:port/retrieve")
        most = share_of(min(settings["num_workers"], settings["rate_limit"]))
        self._service = Service(settings["retrieval_service_url"], key, max_concurrent=most)

    def get_openai_tool_schema(self) -> OpenAIFunctionToolSchema:
        return self.tool_schema or OpenAIFunctionToolSchema.model_validate(SCHEMA)

    async def execute(self, instance_id: str, parameters: dict[str, Any], **kwargs: Any) -> Executed:
        try:
            queries = _queries(parameters)
            question = {"queries": queries, "topk": self._settings["topk"], "return_scores": True}
            answer = await in_thread(self._service.ask, question, self._settings["timeout"])
            passages = _passages(answer, len(queries))
        except (ValueError, ServiceError) as error:
            return ToolResponse(text=f"Error: {_said(error)}"), None, {"error": 1.0}
        metrics = {"error": 0.0, "queries": float(len(queries)), "passages": float(sum(map(len, passages)))}
        return ToolResponse(text="\n\n".join(map(_as_text, queries, passages))), None, metrics


def _queries(parameters: Mapping[str, Any]) -> list[str]:
    """The queries of a call. Raises ValueError where there are none."""
    query_list = parameters.get("query_list", parameters.get("query"))
    queries = [query_list] if isinstance(query_list, str) else query_list
    if not isinstance(queries, list) or not queries or not all(isinstance(query, str) for query in queries):
        raise ValueError('"query_list" has to be a list of texts')
    if len(queries) > MOST_QUERIES:
        raise ValueError(f"at most {MOST_QUERIES} queries at once")
    return [query[:LONGEST_QUERY] for query in queries]


def _passages(answer: Any, num_queries: int) -> list[list[str]]:
    """The passages for each query. Raises ValueError where the service answered something else."""
    lists = answer.get("result") if isinstance(answer, dict) else None
    if not isinstance(lists, list) or len(lists) != num_queries:
        raise ValueError("the search service answered in a form that is not known")
    return [[text for text in map(_text_of, texts if isinstance(texts, list) else []) if text] for texts in lists]


def _text_of(entry: Any) -> str:
    """The text of a passage: ``{"document": {"contents": ...}}``, or the document itself."""
    document = entry.get("document", entry) if isinstance(entry, dict) else entry
    contents = document.get("contents", document.get("text")) if isinstance(document, dict) else document
    return contents[:LONGEST_PASSAGE].strip() if isinstance(contents, str) else ""


def _as_text(query: str, passages: Sequence[str]) -> str:
    """The passages of a query with their titles: the first line of a passage, in quotes, is its title."""
    if not passages:
        return NOTHING
    parts = []
    for number, passage in enumerate(passages, 1):
        title, _, text = passage.partition("\n")
        parts.append(
            f"Doc {number} (Title: {title.strip(chr(34))})\n{text.strip()}" if text else f"Doc {number}\n{title}"
        )
    return "\n\n".join(parts)


def _said(error: Exception) -> str:
    """The error text for the model: no address of a machine of ours."""
    return "the search service gave no answer" if isinstance(error, ServiceError) else str(error)
