"""The dialect of this library's own host (`verl.rollout.server.host`): a request as it is, key of its numbers included.

So a request gets the same tokens from every replica of the `hf` engine, which a server that seeds a generator per
request does not promise across versions or kinds.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from verl.errors import RolloutError
from verl.json_text import JsonObject
from verl.rollout.base import PICTURE_FIELDS, Completion, Request, SamplingParams
from verl.rollout.gated import Sampled
from verl.rollout.scores import ScoreRequest, Scores
from verl.rollout.server.dialect import Dialect, log_probs, token_ids
from verl.rollout.server.pictures import PictureSender, Post

GENERATE, SCORE, SHOW, ABORT, UPDATE, TAKE, SLEEP, WAKE, INFO = (
    f"/verl/{n}" for n in ("generate", "score", "show", "abort", "update", "take", "sleep", "wake", "info")
)


class OwnDialect(Dialect):
    """A sampler of this library in another process."""

    name = "verl"
    updates_from_folder = True
    takes_images = takes_videos = True
    scores_tokens = scores_at_temperature = True

    def __init__(self, *arguments: Any):
        super().__init__(*arguments)
        self._pictures = PictureSender(lambda pictures: self.ask("POST", SHOW, pictures))

    def question(self, request: Request, stops: Sequence[int], seed: int) -> tuple[str, dict[str, Any]]:
        return GENERATE, request_json(request)

    def answer(self, request: Request, content: JsonObject) -> Sampled:
        ids = token_ids(content["token_ids"])
        logs = log_probs(content["log_probs"]) if content["log_probs"] or not ids else None
        return Sampled(ids, logs, str(content["finish_reason"]), num_preempted=int(content["num_preempted"]))

    def score_question(self, request: ScoreRequest) -> tuple[str, JsonObject]:
        return SCORE, asdict(request)

    def scores(self, request: ScoreRequest, content: JsonObject) -> Scores:
        listed = [list(zip(*pair, strict=True)) for pair in zip(content["top_ids"], content["top_log_probs"])]
        return Scores.of(token_ids(content["token_ids"]), content["log_probs"], listed if request.top_k else None)

    async def exchange(self, request: Request, payload: dict[str, Any], post: Post) -> JsonObject:
        return await self._pictures.exchange(request, payload, post)

    async def abort(self, keys: Sequence[str]) -> bool:
        await self.ask("POST", ABORT, {"request_ids": list(keys)})
        return True

    async def weights_folder(self) -> str:
        return str((await self.ask("GET", INFO))["weights_dir"])

    async def update(self, folder: str, version: int) -> None:
        await self.ask("POST", UPDATE, {"version": version})

    async def logprobs_mode(self) -> str | None:
        return str((await self.ask("GET", INFO)).get("logprobs_mode", "processed_logprobs"))

    async def version(self) -> int | None:
        return int((await self.ask("GET", INFO))["version"])

    async def sleep(self, level: int) -> bool:
        await self.ask("POST", SLEEP, {"level": level})
        return True

    async def wake(self) -> bool:
        await self.ask("POST", WAKE, {})
        return True


NUMBER, WHOLE = (int, float), (int,)
KINDS: dict[str, tuple[type, ...]] = {
    **dict.fromkeys(("id", "uid", "session"), (str,)),
    **dict.fromkeys(("sample_index", "priority", "max_tokens", "min_tokens", "top_k", "seed", "start"), WHOLE),
    **dict.fromkeys(("temperature", "top_p", "repetition_penalty"), NUMBER),
    **dict.fromkeys(("ignore_eos", "do_sample"), (bool,)),
}
"""What the fields of a request hold. One of another kind fails inside the engine, and all requests there with it."""


def request_json(request: Request) -> dict[str, Any]:
    """A request as JSON, without its images."""
    fields = {name: value for name, value in vars(request).items() if name not in PICTURE_FIELDS}
    return {**fields, "sampling": vars(request.sampling)}


def from_json(content: JsonObject, pictures: Mapping[str, Any] | None = None) -> Request:
    """The request in a payload.

    Args:
        pictures: its fields that `request_json` leaves out; None for text.

    Raises:
        RolloutError: it is none.
    """
    try:
        sampling = dict(content["sampling"])
        sampling["stop_token_ids"] = tuple(int(token) for token in sampling["stop_token_ids"])
        rest = {name: value for name, value in content.items() if name != "sampling"}
        for name in ("token_ids", "generated_prefix"):
            rest[name] = token_ids(rest[name])
        _check_kinds({**rest, **sampling})
        seen = {**dict.fromkeys(PICTURE_FIELDS), **(pictures or {})}  # the payload itself may have none
        return Request(**rest, **seen, sampling=SamplingParams(**sampling))
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise RolloutError(f"not a request: {type(error).__name__}: {error}") from error


def _check_kinds(fields: Mapping[str, object]) -> None:
    for name, value in fields.items():
        kinds = KINDS.get(name)
        if kinds and (not isinstance(value, kinds) or (isinstance(value, bool) and bool not in kinds)):
            raise TypeError(f"{name} is {value!r}, allowed: {' or '.join(kind.__name__ for kind in kinds)}")


def score_from_json(content: JsonObject) -> ScoreRequest:
    """The request for log-probs in a payload.

    Raises:
        RolloutError: it is none.
    """
    try:
        _check_kinds(content)
        return ScoreRequest(**{**content, "token_ids": token_ids(content["token_ids"])})
    except (KeyError, TypeError, ValueError) as error:
        raise RolloutError(f"not a request: {type(error).__name__}: {error}") from error


def scores_json(scores: Scores) -> JsonObject:
    """An answer as JSON."""
    listed = {name: [] if table is None else table.tolist() for name, table in
              (("top_ids", scores.top_ids), ("top_log_probs", scores.top_log_probs))}  # fmt: skip
    return {"token_ids": scores.token_ids, "log_probs": scores.log_probs.tolist(), **listed}


def completion_json(done: Completion) -> dict[str, Any]:
    """A completion as JSON."""
    return {
        "token_ids": done.token_ids,
        "log_probs": done.log_probs,
        "finish_reason": done.finish_reason,
        "num_preempted": done.num_preempted,
        "token_versions": done.token_versions,
        "is_interrupted": done.is_interrupted,
    }
