"""A language model that judges, on servers that a run starts, watches, restarts and stops (``reward.reward_model``).

Reward functions know one address on loopback, whose first part of the path is a key. Behind it stands OpenAI's
interface of `verl.agent_loop.server` over a service of replicas; each replica is `verl.rollout.server.host` in a child
process with the engine of ``reward_model.rollout.name``.

Consumes: requests of reward functions, and deaths of servers. Waits for: a server's answer, or its restart. Unblocked
by: either one; a request whose server is lost moves to another server, or to the restarted one, and its client sees a
slow answer. After ``rollout.server.max_restarts`` in a row every request fails, and `Judges.error` says why.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import hmac
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any

from verl.agent_loop.client import SamplerClient
from verl.agent_loop.server.conversation import ANY_MODEL, Conversation
from verl.agent_loop.server.endpoint import Endpoint
from verl.agent_loop.server.forms import ClientForm
from verl.agent_loop.server.prompts import Prompts
from verl.config import replace
from verl.config.schema.model import HFModelConfig
from verl.config.schema.reward import JUDGE_ENGINES, RewardModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ModelError, VerlError
from verl.metrics import notice
from verl.outcomes import on_error, settle
from verl.protocol.tokenizer import Tokenizer
from verl.rollout.gated import UNLIMITED
from verl.rollout.lost import EngineBusyError, EngineLostError, EngineSilentError
from verl.rollout.model_facts import ModelFacts
from verl.rollout.server.child import host_process
from verl.rollout.server.client import HttpClient, checked_json
from verl.rollout.server.own import INFO
from verl.rollout.server.process import HostProcess
from verl.rollout.server.sampler import ServerSampler
from verl.rollout.service import SamplerService
from verl.serving import ApiError, HttpRequest, HttpResponse, loopback, secret
from verl.storage import copy_to_local

KEY = "reward.reward_model"
HEARTBEAT_SECONDS = 0.5
"""Between two questions whether a server is alive."""
ANSWER_SECONDS = 24 * 3600.0
"""Servers are watched; how long an answer takes is limited by the reward function that waits for it."""
HANG_SECONDS = 600.0
"""After which a server without an answer, or without progress, hangs, unless ``trainer.hang_seconds`` is set."""
PROGRESS = ("requests", "response_tokens", "prompt_tokens", "steps")
"""Counters of a server, one of which grows while it works on a request."""
CLOSE_SECONDS = 60.0
END_SECONDS = 1.0
"""Connections break a moment before the process exits."""
REMEMBERED = 100_000
SHARED = ("dtype", "gpu_memory_utilization", "enforce_eager", "max_num_batched_tokens", "max_num_seqs", "seed",
          "tensor_model_parallel_size")  # fmt: skip
"""Settings of the reward model's servers that the section of a sampler has, too."""


@dataclass(frozen=True)
class JudgeSections:
    """The judge as the sections ``rollout`` and ``model`` of the configuration that its servers read."""

    rollout: RolloutConfig
    model: HFModelConfig

    @classmethod
    def of(cls, judge: RewardModelConfig) -> JudgeSections:
        """From ``reward.reward_model``.

        Raises:
            ModelError: the model does not exist.
        """
        settings, key, engines = judge.rollout, f"{KEY}.model_path", RolloutConfig().engine_kwargs.keys()
        path = copy_to_local(judge.model_path or "", use_shm=judge.use_shm, error=ModelError, key=key)
        inherited, longest = ("trust_remote_code", "external_lib", "override_config"), ModelFacts.of(path).max_model_len
        model = replace(HFModelConfig(), path=path, **{name: judge[name] for name in inherited})
        rollout = replace(
            RolloutConfig(),
            name=JUDGE_ENGINES[settings.name],
            calculate_log_probs=False,
            free_cache_engine=False,
            load_format="auto",
            enable_sleep_mode=False,
            max_model_len=settings.max_model_len or (None if longest == UNLIMITED else longest),
            **{name: settings[name] for name in SHARED},
            **{f"engine_kwargs.{name}": settings.engine_kwargs.get(name) or {} for name in engines},
        )
        limits = {"timeout": ANSWER_SECONDS, "max_start_wait_time": settings.server.max_start_wait_time}
        return cls(replace(rollout, server=replace(rollout.server, **limits)), model)

    @property
    def of_server(self) -> RolloutConfig:
        """The section ``rollout`` of a server, whose sampler queries no other one."""
        return replace(self.rollout, server=type(self.rollout.server)())


def count_servers(judge: RewardModelConfig) -> int:
    """How many servers: as many as the pool holds, or ``data_parallel_size`` without one."""
    if not judge.enable_resource_pool:
        return judge.rollout.data_parallel_size
    return judge.nnodes * judge.n_gpus_per_node // judge.rollout.tensor_model_parallel_size


class JudgeEndpoint(Endpoint):
    """The clients' side of a judge: each request stands alone, and nothing of it is kept.

    Random numbers of a request follow from its body and from how many equal ones came before, and not from the order in
    which reward functions send theirs. Equal requests that name a seed draw equal answers, one after the other.

    Args:
        sampler: of the judge.
        tokenizer: of the judge.
        sections: of the judge.
        path: its model, as requests may name it; any other name is taken, too.
    """

    def __init__(self, sampler: SamplerService, tokenizer: Tokenizer, sections: JudgeSections, path: str):
        super().__init__()
        self.server.key_in_path = True
        self.key = f"sk-verl-{secret.new_key()}"  # messages hide what has this form
        self.requests = 0
        self._sampler, self._prompts, self._names = sampler, Prompts(tokenizer), (path, ANY_MODEL)
        self._context, self._seed = sections.rollout.max_model_len or UNLIMITED, sections.rollout.seed
        self._seen: Counter[str] = Counter()
        self._in_flight: Counter[str] = Counter()
        self._of_seed: dict[str, asyncio.Lock] = {}

    def _owner(self, token: str) -> Conversation | None:
        if not hmac.compare_digest(self.key.encode(), token.encode(errors="surrogatepass")):
            return None
        return Conversation(
            client=SamplerClient(self._sampler, "", 0, self._seed, self._context),
            sampling={},
            budget=self._context,
            prompts=self._prompts,
            context=self._context,
            models=self._names,
            follows_request=True,
            limit=f"{KEY}.rollout.max_model_len",
        )

    async def _complete(self, form: type[ClientForm], request: HttpRequest) -> HttpResponse:
        owner: Conversation = request.owner
        digest = hashlib.sha256(request.body).hexdigest()
        self.requests += 1
        self._in_flight[digest] += 1
        try:
            if _names_seed(request):
                owner.client.uid, owner.client.sample_index = digest, 0
                # They have one key, and a sampler takes no two requests of one key at a time.
                async with self._of_seed.setdefault(digest, asyncio.Lock()):
                    answered = await super()._complete(form, request)
            else:
                owner.client.uid, owner.client.sample_index = digest, self._number(digest)
                answered = await super()._complete(form, request)
        finally:
            self._in_flight[digest] -= 1
            if not self._in_flight[digest]:
                del self._in_flight[digest]
                self._of_seed.pop(digest, None)
        if owner.lost is None:
            return answered
        error = ApiError(503, f"The judge does not answer: {owner.lost.message}", "judge_lost")
        return HttpResponse(form.error(error), status=error.status)

    def _number(self, digest: str) -> int:
        """How many equal requests came before; no two in flight have one number."""
        if len(self._seen) >= REMEMBERED:
            self._seen = Counter({one: self._seen[one] for one in self._in_flight})
        number = self._seen[digest]
        self._seen[digest] += 1
        return number


def _names_seed(request: HttpRequest) -> bool:
    try:
        body = request.json()
    except ApiError:
        return False  # the form refuses it, and says why
    return isinstance(body, Mapping) and body.get("seed") is not None


class Progress:
    """Whether a server does what it is there for, by what it says of itself.

    Args:
        limit: seconds for which it may leave questions without an answer, or requests without progress.
        now: the time of its start.
    """

    def __init__(self, limit: float, now: float):
        self.limit = limit
        self._heard_at = self._moved_at = now
        self._counts: tuple[object, ...] = ()

    def heard(self, now: float, stats: Mapping[str, object] | None = None) -> None:
        """It answered; ``stats`` are its counters, where the answer has them."""
        self._heard_at = now
        counts = self._counts if stats is None else tuple(stats.get(name) for name in PROGRESS)
        if counts != self._counts:
            self._counts, self._moved_at = counts, now

    def hang(self, now: float, load: int) -> str:
        """Why it counts as lost; empty where it does not.

        Args:
            load: requests that it has. Without any it need not move.
        """
        if not load:
            self._moved_at = now
        if now - self._heard_at > self.limit:
            return f"it has not answered for {self.limit:g} s"
        if now - self._moved_at > self.limit:
            return f"it has {load} request(s) and has computed nothing for {self.limit:g} s"
        return ""


class Judges:
    """The servers of a run's judge, and the address before them; a thread with an event loop does all of it.

    Args:
        judge: the section ``reward.reward_model``.
        tokenizer: loads that of the judge.
        hang_seconds: a server that is silent, or has requests and computes nothing, for longer is restarted; None:
            `HANG_SECONDS`.

    Attributes:
        address: host, port and key, for ``http://{address}/v1/chat/completions``.
        restarts: since `start`.
        error: why the servers were given up; empty while they are not.
        resources: closed after the servers' end: what they hold, like GPUs that were reserved for them.

    Example:
        >>> judges = Judges(config.reward.reward_model, lambda: hf_tokenizer(path)); judges.start("cpu"); judges.close()
    """

    def __init__(self, judge: RewardModelConfig, tokenizer: Callable[[], Tokenizer], hang_seconds: float | None = None):
        self.count, self._settings = count_servers(judge), judge.rollout
        self._sections = JudgeSections.of(judge)
        self._limit = HANG_SECONDS if hang_seconds is None else hang_seconds
        self.resources = contextlib.ExitStack()
        slots = judge.rollout.max_num_seqs
        # A death costs a request two attempts: the one that it breaks, and one at a port where nobody listens.
        resends = 2 * (judge.rollout.server.max_restarts + 1)
        self._service = SamplerService({}, max_resends=resends, slots=slots, is_elastic=True)
        self._endpoint = JudgeEndpoint(self._service, tokenizer(), self._sections, str(judge.model_path))
        self._listener = loopback()
        self.address = f"127.0.0.1:{self._listener.getsockname()[1]}/{self._endpoint.key}"
        self.restarts, self.error = 0, ""
        self._requests = self._resent = 0
        self._key = secret.new_key()
        self._processes: dict[int, HostProcess] = {}
        self._starting: set[int] = set()
        self._device, self._gpus = "cpu", [""] * self.count
        self._up: Future[None] = Future()
        self._is_closing = threading.Event()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def start(self, device: str, gpus: Sequence[str] = ()) -> None:
        """Return once every server answers.

        Args:
            device: of the servers.
            gpus: one text per server, for CUDA_VISIBLE_DEVICES; empty on a CPU.

        Raises:
            EngineLostError: one of them did not come up; all are ended.
        """
        self._device, self._gpus = device, list(gpus) or self._gpus
        outcome: Future[None] = Future()

        def work() -> None:
            settle(outcome, lambda: asyncio.run(self._serve()))
            error = outcome.exception()
            if not self._up.done():
                self._up.set_exception(error or EngineLostError("the judge was closed while it started"))
            elif error is not None:
                self.error = f"{type(error).__name__}: {error}"

        with on_error(lambda _: self.close()):
            self._thread = threading.Thread(target=work, name="verl-judges", daemon=True)
            self._thread.start()
            self._up.result()

    @property
    def is_mending(self) -> bool:
        """Whether a server is being restarted, which reward functions wait for."""
        return bool(self._starting) and not self.error

    def check(self) -> None:
        """Raises `EngineLostError` once the servers are given up."""
        if self.error:
            raise EngineLostError(self.error, key=f"{KEY}.rollout.server.max_restarts")

    def metrics(self) -> dict[str, float]:
        """Servers that answer, restarts since `start`, and requests and resends since the last call."""
        stats, requests = self._service.stats(), self._endpoint.requests
        before, self._requests, self._resent = (self._requests, self._resent), requests, int(stats["resent"])
        return {
            "reward_model/replicas": stats["replicas_alive"],
            "reward_model/restarts": float(self.restarts),
            "reward_model/requests": float(requests - before[0]),
            "reward_model/resent": float(self._resent - before[1]),
        }

    def close(self) -> None:
        """End the servers; nothing happens the second time."""
        self._is_closing.set()  # for a thread that has no loop yet
        thread, loop, self._thread = self._thread, self._loop, None
        if thread is not None and thread.is_alive():
            if loop is not None:
                with contextlib.suppress(RuntimeError):  # the loop has just ended
                    loop.call_soon_threadsafe(self._end.set)
            thread.join(CLOSE_SECONDS)
            if thread.is_alive():
                notice(KEY, f"its servers have not ended within {CLOSE_SECONDS:g} s; they end with this process")
        self._listener.close()
        self.resources.close()

    # ---- in the thread -----------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._end = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        if self._is_closing.is_set():
            return
        ending = asyncio.ensure_future(self._end.wait())
        await self._endpoint.server.start(self._listener)
        keepers: list[asyncio.Task[None]] = []
        try:
            launching = asyncio.gather(*(self._launch(number) for number in range(self.count)))
            either: list[asyncio.Future[Any]] = [ending, launching]
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if ending.done():
                launching.cancel()
                return
            await launching
            self._up.set_result(None)
            keepers = [asyncio.create_task(self._keep(number)) for number in range(self.count)]
            await asyncio.wait([ending, *keepers], return_when=asyncio.FIRST_COMPLETED)
            lost = next((keeper.exception() for keeper in keepers if keeper.done()), None)
            if lost is not None:
                self.error = f"{type(lost).__name__}: {lost}"
                await self._service.give_up(self.error)
                await ending
        finally:
            for keeper in keepers:
                keeper.cancel()
            await asyncio.gather(*(asyncio.to_thread(process.close) for process in list(self._processes.values())))
            await asyncio.gather(*keepers, return_exceptions=True)
            await self._endpoint.server.close()

    async def _launch(self, number: int) -> None:
        """Start a server, and give it requests once it answers.

        Raises:
            EngineLostError: it did not come up.
        """
        self._starting.add(number)
        try:
            rollout, model, name = self._sections.of_server, self._sections.model, f"judge server {number}"
            variables = {"CUDA_VISIBLE_DEVICES": self._gpus[number]} if self._gpus[number] else None
            process = self._processes[number] = host_process(
                rollout, model, self._device, name, environment=variables, key=self._key, count=self.count
            )
            await process.wait_until_up(self._settings.server.max_start_wait_time)
            sampler = await asyncio.to_thread(self._sampler_over, process.url)
            await self._service.add(process.name, sampler)
        finally:
            self._starting.discard(number)

    def _sampler_over(self, url: str) -> ServerSampler:
        rollout, model = self._sections.rollout, self._sections.model
        # A death breaks the connection at once, and another server answers sooner than a retry.
        return ServerSampler.one_of(rollout, model, url, api="verl", max_attempts=1, api_key=self._key)

    async def _keep(self, number: int) -> None:
        """Restart a server whenever it is lost.

        Raises:
            EngineLostError: it was lost too often in a row.
        """
        in_a_row = 0
        while True:
            reason, has_answered = await self._until_lost(number)
            in_a_row = 1 if has_answered else in_a_row + 1
            while in_a_row <= self._settings.server.max_restarts:
                self.restarts += 1
                notice(
                    f"{KEY}, restart {self.restarts}",
                    f"{reason}. It is started again; its requests wait for it or go to another server. A call of the "
                    "reward function that exceeds reward.timeout meanwhile fails",
                )
                try:
                    await self._launch(number)
                    break
                except (VerlError, OSError) as error:  # no memory for a process, no descriptor, no folder
                    reason, in_a_row = f"{type(error).__name__}: {error}", in_a_row + 1
                    await asyncio.to_thread(self._processes[number].close)
            else:
                message = f"judge server {number} was lost {in_a_row} times in a row without an answer in between"
                raise EngineLostError(f"{message}, the last time: {reason}")

    async def _until_lost(self, number: int) -> tuple[str, bool]:
        """Return once a server has ended or hangs: what happened, and whether it has answered requests."""
        process = self._processes[number]
        client, reason = HttpClient(process.url, key=process.key), ""
        progress = Progress(self._limit, time.monotonic())
        while process.is_alive and not reason:
            await asyncio.sleep(HEARTBEAT_SECONDS)
            await self._service.look()  # else it remembers every request that moved
            try:
                answer = checked_json(await client.ask("GET", INFO, timeout=self._limit), f"{process.url}{INFO}")
                progress.heard(time.monotonic(), answer["stats"])
            except EngineBusyError:
                progress.heard(time.monotonic())  # as many connections as it takes: it is alive
            except EngineSilentError as error:
                reason = error.message
            except EngineLostError:
                await self._let_end(process)
            load = sum(one.load for one in self._service.replicas if one.name == process.name)
            reason = reason or progress.hang(time.monotonic(), load)
        reason = f"{process.name}: {reason}"
        completed = self._service.replica_stats().get(process.name, {}).get("completed", 0)
        await self._service.discard(process.name)
        reason = reason if process.is_alive else process.exit_report
        await asyncio.to_thread(process.close)
        return reason, completed > 0

    async def _let_end(self, process: HostProcess) -> None:
        end = asyncio.get_running_loop().time() + END_SECONDS
        while process.is_alive and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(HEARTBEAT_SECONDS / 10)
