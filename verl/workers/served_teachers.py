"""Teachers behind servers: which tokens are sent for each row, and the columns that the answers make.

Servers that run already are named by address. Others are hosts of this library, which the run starts, watches and ends.
Shapes: B rows, T response tokens, K listed tokens per position.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import numpy as np
import torch

from verl import device as devices
from verl.agent_loop.served import devices_of_server
from verl.config import HFModelConfig, PPOTrainerConfig, RolloutConfig, replace
from verl.config.machine.config_json import facts_of
from verl.config.schema.algorithm import TOP_K_KINDS
from verl.config.schema.root import Teacher, teachers_of
from verl.engines.seen_rows import has_pictures
from verl.errors import ConfigError, NotBuiltError, VerlError
from verl.metrics import MetricSet
from verl.outcomes import on_error, run_now
from verl.protocol import DataProto
from verl.protocol.lazy import fetched
from verl.rollout.gated import UNLIMITED
from verl.rollout.reload_check import probe_tokens
from verl.rollout.scores import ScoreRequest, Scores
from verl.rollout.server.child import host_process
from verl.rollout.server.process import HostProcess
from verl.rollout.server.sampler import ServerSampler, addresses
from verl.rollout.server.scoring import ScoringPool, ScoringReplica, WatchedHost

PROBE_TOKENS = 4
POLICY = re.compile(r"actor_rollout_ref\.rollout\.(?!temperature)")
"""How messages of a server name a setting that is one of ``inference`` here."""


class ServedTeachers:
    """The servers of a run's teachers.

    Args:
        models: the section of each teacher's model, by the teacher's name.
        device: kind of device of hosts that are started here.

    Raises:
        VerlError: a server does not come up, or does not score a few tokens.
    """

    def __init__(self, config: PPOTrainerConfig, models: Mapping[str, HFModelConfig], device: str):
        loss, policy = config.distillation.distillation_loss, config.actor_rollout_ref
        self._vocab_size = int((facts_of(policy.model.path) or {}).get("vocab_size") or UNLIMITED)
        self._top_k = min(loss.topk, self._vocab_size) if loss.loss_mode in TOP_K_KINDS else 0
        self._temperature = float(policy.rollout.temperature)
        self._rollout, self._models, self._device, self._started = policy.rollout, models, device, 0
        self._teachers = {teacher.name: teacher for teacher in teachers_of(config) if teacher.is_served}
        self._count = sum(teacher.num_replicas for teacher in self._teachers.values())
        self._pools: dict[str, ScoringPool] = {}
        with on_error(lambda _: self.close()):
            for name, teacher in self._teachers.items():
                with named(teacher):
                    self._pools[name] = self._pool(teacher)
            for name, pool in self._pools.items():
                probe = tuple(probe_tokens(self._vocab_size, PROBE_TOKENS))
                with named(self._teachers[name]):
                    run_now(pool.check(ScoreRequest("a probe", probe, 1, self._top_k, self._temperature)))

    def infer(self, name: str, batch: DataProto, rows: Sequence[str], metrics: MetricSet) -> Mapping[str, torch.Tensor]:
        """What the role of a teacher would answer: log_probs (B, T), or top_k_ids and top_k_log_probs (B, T, K).

        Args:
            rows: (B,) what messages call them.
            metrics: of the step; gets ``distillation/requests``, ``retries``, ``restarts`` and ``seconds``.

        Raises:
            NotBuiltError: a row has images or videos.
            VerlError: a row was not scored.
        """
        pool, began = self._pools[name], time.monotonic()
        with named(self._teachers[name]):
            if has_pictures(batch.non_tensor_batch):
                message = "its rows have images or videos, which are not sent to the servers of a teacher yet"
                fix = f"Leave out {self._teachers[name].key}.inference and num_replicas: a teacher in a role sees them."
                raise NotBuiltError(message, fix=fix)
            requests = self._requests(batch, rows)
            scores = run_now(pool.score_all(list(requests.values())))
        for metric, count in pool.take_counts().items():
            metrics.add(f"distillation/{metric}/{name}", count, "sum")
        metrics.add(f"distillation/seconds/{name}", time.monotonic() - began, "sum")
        return self._columns(dict(zip(requests, scores)), fetched(batch.tensors["response_mask"]))

    def close(self) -> None:
        """End the hosts that were started."""
        for pool in self._pools.values():
            pool.close()

    def _pool(self, teacher: Teacher) -> ScoringPool:
        rollout = replace(teacher.servers(self._rollout), calculate_log_probs=False)
        server, slots = rollout.server, min(rollout.max_num_seqs, rollout.server.max_connections)
        replicas = self._hosts(teacher, rollout) if teacher.num_replicas else self._named(teacher, rollout)
        return ScoringPool(replicas, self._vocab_size, slots, server.max_attempts, server.retry_delay)

    def _named(self, teacher: Teacher, rollout: RolloutConfig) -> list[ScoringReplica]:
        model = self._models[teacher.name]
        return [
            ScoringReplica(url, ServerSampler.one_of(rollout, model, url, max_attempts=1))
            for url in addresses(rollout.server.url)
        ]

    def _hosts(self, teacher: Teacher, rollout: RolloutConfig) -> Sequence[ScoringReplica]:
        model, on = self._models[teacher.name], self._device
        count = devices.device_count(on)
        if not count:
            message = f"its servers run on this machine, which has no {on} device"
            fix = f"Start them elsewhere, and set {teacher.key}.inference.name=server and its addresses."
            raise ConfigError(message, key=f"{teacher.key}.num_replicas", got=teacher.num_replicas, fix=fix)

        def connect(process: HostProcess) -> ServerSampler:
            return ServerSampler.one_of(rollout, model, process.url, api="verl", max_attempts=1, api_key=process.key)

        hosts: list[ScoringReplica] = []
        with on_error(lambda _: ScoringPool(hosts, 0, 0, 0, 0.0).close()):
            for number in range(teacher.num_replicas):
                name = f"{teacher.name}, server {number}"
                variables = devices_of_server(self._started % count, 1, on)  # those of all teachers take turns
                start = partial(host_process, rollout, model, on, name, environment=variables, count=self._count)
                hosts.append(WatchedHost(name, start, connect, rollout.server.max_start_wait_time))
                self._started += 1
        return hosts

    def _requests(self, batch: DataProto, rows: Sequence[str]) -> dict[int, ScoreRequest]:
        """Place in the batch -> the prompt and the response up to the last token that is trained on, where one is."""
        ids, attended, mask = (
            fetched(batch.tensors[name]) for name in ("input_ids", "attention_mask", "response_mask")
        )
        width = ids.shape[1] - mask.shape[1]
        ends = (mask * torch.arange(1, mask.shape[1] + 1)).amax(-1).tolist()
        requests = {}
        for place in np.flatnonzero(ends).tolist():
            last = width + ends[place]
            tokens = ids[place, :last][attended[place, :last].bool()].tolist()
            start = int(attended[place, :width].sum())
            requests[place] = ScoreRequest(rows[place], tuple(tokens), start, self._top_k, self._temperature)
        return requests

    def _columns(self, scores: Mapping[int, Scores], mask: torch.Tensor) -> dict[str, torch.Tensor]:
        """Of answers by their place in a batch; zero where nothing is trained on, as an engine has it."""
        log_probs = torch.zeros(mask.shape)
        ids = torch.zeros(*mask.shape, self._top_k, dtype=torch.int32)
        listed = torch.zeros(ids.shape)
        for place, one in scores.items():
            inside = mask[place].nonzero().flatten()
            log_probs[place, inside] = torch.from_numpy(one.log_probs)[inside]
            if one.top_ids is not None and one.top_log_probs is not None:
                ids[place, inside] = torch.from_numpy(one.top_ids)[inside].int()
                listed[place, inside] = torch.from_numpy(one.top_log_probs)[inside]
        return {"top_k_ids": ids, "top_k_log_probs": listed} if self._top_k else {"log_probs": log_probs}


@contextmanager
def named(teacher: Teacher) -> Iterator[None]:
    """An error of a teacher's servers names the teacher, and its settings instead of the policy's."""
    try:
        yield
    except VerlError as error:
        section = f"{teacher.key}.inference."
        message, key, fix = (POLICY.sub(section, text) for text in (error.message, error.key or "", error.fix))
        raise type(error)(
            f"the teacher {teacher.name}: {message}",
            key=key or teacher.key,
            got=error.got,
            allowed=error.allowed,
            fix=fix,
        ) from error.__cause__
