"""The `hf` sampler on the ranks of a tensor group: one leads, the others take the same steps.

Consumes: on the leader requests, as every sampler; on the others what the leader tells them before each step: who has
joined, who has left. Waits for: a follower for the leader, and in a step all for each other. Unblocked by: the leader's
next step, or the end of its turn. The state of a scheduler is a function of what it was told, and logits are the same
bits on all ranks, so all admit the same rows and draw the same tokens with the same random numbers.
"""

from __future__ import annotations

import asyncio
import dataclasses
from typing import Any, cast

import torch

from verl.device import torch_dtype
from verl.errors import NotBuiltError, RolloutError
from verl.metrics import notice
from verl.models import load_causal_lm
from verl.rollout.base import Completion, Request, SamplingParams
from verl.rollout.hf.parts import KEY, Load, Part, empty_part, read_folder
from verl.rollout.hf.rows import Row
from verl.rollout.hf.sampler import HFSampler

STEP, HELD_STEP, END = 0, 1, 2


class LockstepSampler(HFSampler):
    """Samples from a model of which this rank has a part.

    The first rank of the group is used like any other sampler, and calls `end_turn` when its requests are answered;
    meanwhile the others are in `follow`. `update_weights`, `sleep` and `wake` are called on all of them.

    Args:
        part: this rank's.
        options: see `HFSampler`.

    Raises:
        NotBuiltError: ``full_determinism``, whose sums would have to have one order for every batch.
    """

    def __init__(self, part: Part, **options: Any):
        refuse_determinism(options.get("full_determinism", False))
        if part.model.device.type == "cuda" and not options.get("enforce_eager"):
            notice(KEY, "CUDA graphs are not built for sampling on several ranks: it decodes without them")
        super().__init__(part.model, **{**options, "paged": False, "owns_model": True}, part=part)
        self.peers = part.peers
        self._told: list[Any] = []

    @classmethod
    def with_part(cls, rollout: Any, model: Any, device: str, peers: Any) -> LockstepSampler:
        """From the sections ``rollout`` and ``model``; each rank reads its slices of the model's folder."""
        part = empty_part(loader(rollout, model, device), peers, device)
        read_folder(part, str(model.path))
        return cast(LockstepSampler, cls.configured(rollout, part))

    @property
    def leads(self) -> bool:
        """Whether this rank answers requests."""
        return self.peers.is_first

    async def generate(self, request: Request) -> Completion:
        if not self.leads:
            raise RolloutError("only the first rank of a tensor group takes requests", got=repr(self.peers))
        return await super().generate(request)

    def end_turn(self) -> None:
        """Let the others go on with something else; nothing is sampled until the next request."""
        self._tell(END)

    def follow(self) -> None:
        """Take the leader's steps until its turn ends."""
        while (kind := self._listen()) != END:
            self._is_held = kind == HELD_STEP
            try:
                super()._step()
            except RolloutError as error:  # on the leader, too: it comes from numbers that all ranks have
                self._give_up(error)
            self._is_held = False
            self._in_flight = {name: row for name, row in self._in_flight.items() if row.state != "ended"}

    def _enter(self, request: Request, future: asyncio.Future[Completion] | None) -> Row:
        self._told.append(["enter", _as_facts(request)])
        return super()._enter(request, future)

    def _withdraw(self, row: Row) -> None:
        if row.state != "ended":
            self._told.append(["leave", row.request.id])
        super()._withdraw(row)

    def _step(self) -> None:
        self._tell(HELD_STEP if self._is_held else STEP)
        super()._step()

    def _tell(self, kind: int) -> None:
        told, self._told = self._told, []
        self.peers.broadcast(torch.tensor([kind, bool(told)]))
        if told:
            self.peers.from_first(told)

    def _listen(self) -> int:
        kind, has_news = self.peers.broadcast(torch.zeros(2, dtype=torch.int64)).tolist()
        for what, fact in self.peers.from_first(None) if has_news else ():
            if what == "enter":
                self._enter(_as_request(fact), None)
            elif fact in self._in_flight:
                self._withdraw(self._in_flight.pop(fact))
        self._told = []
        return int(kind)


def refuse_determinism(wanted: bool) -> None:
    """Raise `NotBuiltError`: how numbers of several ranks are summed depends on how many there are in a batch."""
    if wanted:
        raise NotBuiltError(
            "bitwise equal results are not built for sampling on several ranks",
            key="actor_rollout_ref.rollout.full_determinism",
            fix=f"Set {KEY} to 1, or this to false.",
        )


def sampling_dtype(rollout: Any, device: str) -> torch.dtype:
    """``rollout.dtype``; auto is bfloat16 on an accelerator and float32 on CPU."""
    auto = "float32" if device == "cpu" else "bfloat16"
    return torch_dtype(auto if rollout.dtype == "auto" else rollout.dtype)


def loader(rollout: Any, model: Any, device: str) -> Load:
    """Makes the sampler's model without values."""

    def load() -> Any:
        return load_causal_lm(
            str(model.path),
            sampling_dtype(rollout, device),
            model.override_config,
            model.trust_remote_code,
            external_lib=model.external_lib,
            hf_config_path=model.hf_config_path,
            device="meta",
        )

    return load


def _as_facts(request: Request) -> dict[str, Any]:
    """What of a request its rows depend on."""
    return {
        "id": request.id,
        "token_ids": list(request.token_ids),
        "sampling": dataclasses.asdict(request.sampling),
        "uid": request.uid,
        "sample_index": request.sample_index,
        "generated_prefix": list(request.generated_prefix),
        "priority": request.priority,
    }


def _as_request(facts: dict[str, Any]) -> Request:
    stops = tuple(facts["sampling"].pop("stop_token_ids"))
    sampling = SamplingParams(**facts["sampling"], stop_token_ids=stops)
    tuples = {name: tuple(facts[name]) for name in ("token_ids", "generated_prefix")}
    return Request(**{**facts, **tuples, "sampling": sampling})
