"""The `server` sampler: every request goes to an HTTP server that was started separately.

Consumes: requests, each a task of its caller. Waits for: the server, at most `timeout` seconds an attempt. Unblocked
by: its answer, or the last attempt's failure, which says what happened.
"""

from __future__ import annotations

import asyncio
import atexit
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from verl import env
from verl.config.schema.model import HFModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.data import hf_tokenizer
from verl.errors import ConfigError, RolloutError
from verl.json_text import Json, JsonObject
from verl.metrics import notice
from verl.models import load_model_config
from verl.models.vision import family_of
from verl.outcomes import run_now
from verl.protocol.tokenizer import Tokenizer
from verl.rollout import reload_check
from verl.rollout.base import LOGPROBS_MODES, Request, Sampler, SamplingParams, check_logprobs_mode
from verl.rollout.gated import UNLIMITED, GatedSampler, Sampled, invalid_reason, request_seed
from verl.rollout.lost import EngineLostError
from verl.rollout.model_facts import ModelFacts
from verl.rollout.scores import ScoreRequest, Scores
from verl.rollout.server.client import Breaker, HttpClient, Retrying, checked_json
from verl.rollout.server.dialect import Dialect
from verl.rollout.server.openai import OpenAIDialect, VLLMDialect
from verl.rollout.server.own import INFO, OwnDialect
from verl.rollout.server.tgi import TGIDialect
from verl.rollout.server.weights import WeightFolder
from verl.rollout.service import SamplerService
from verl.rollout.sglang.dialect import SGLangDialect
from verl.rollout.stream_check import StreamCheck, shapes_on_disk
from verl.weight_sync import WeightChunk

DIALECTS: dict[str, type[Dialect]] = {
    d.name: d for d in (VLLMDialect, SGLangDialect, TGIDialect, OwnDialect, OpenAIDialect)
}
MARKS = {"vllm": "/version", "sglang": "/get_model_info", "tgi": "/info", "verl": INFO}
"""A path that only this kind of server has."""
UPDATE_SECONDS = 600.0
POLL_SECONDS = 0.5
SILENT_SECONDS = 10.0
"""That a server may take to its first answer before a notice says what the run waits for."""
_R = "actor_rollout_ref.rollout"
_S = f"{_R}.server"


class ServerSampler(GatedSampler):
    """Samples by requests to a server.

    Args:
        url: ``http://host:port`` or ``unix:/path`` of the server.
        model: the folder of the model that it serves, for what is checked here and for its tokenizer.
        api: ``vllm``, ``sglang``, ``tgi``, ``verl``, ``openai``, or ``auto``, which asks the server.
        served_model: the name under which it serves it; None asks the server.
        timeout: seconds of one attempt.
        max_attempts, retry_delay: see `Retrying`.
        max_start_wait: seconds to wait for a server that is not up yet.
        cooldown: seconds for which a server that failed several times in a row is left alone; see `Breaker`.
        api_key: sent as a bearer token; to a host of this library only once it has proved that it knows it, too.
        weights_dir: where new weights are put down for the server; None makes a folder.
        wants_log_probs: refuse to sample where the server's log-probs are not those of ``logprobs_mode``; False leaves
            them out there.
        logprobs_mode: one of `LOGPROBS_MODES`.

    Example:
        >>> sampler = ServerSampler("http://localhost:8000", model="path/to/model")
        >>> await sampler.generate(Request("a", (5, 6), SamplingParams(max_tokens=4)))
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        api: str = "auto",
        served_model: str | None = None,
        timeout: float = 60.0,
        max_attempts: int = 3,
        retry_delay: float = 2.0,
        max_connections: int = 1000,
        max_start_wait: float = 300.0,
        cooldown: float = 5.0,
        api_key: str | None = None,
        weights_dir: str | None = None,
        seed: int = 0,
        wants_log_probs: bool = True,
        tokenizer: Tokenizer | None = None,
        logprobs_mode: str = "processed_logprobs",
    ):
        if api not in (*DIALECTS, "auto"):
            raise ConfigError("unknown kind of server", key=f"{_S}.api", got=api, allowed=["auto", *DIALECTS])
        self.facts = ModelFacts.of(model)
        super().__init__(
            vocab_size=self.facts.vocab_size,
            max_model_len=self.facts.max_model_len,
            seed=seed,
            name=f"the server {url}",
        )
        self.takes_images = self.takes_videos = self.facts.image_token_id is not None
        self.url, self.model, self.api, self.served_model = url, model, api, served_model
        self.timeout, self.max_start_wait = timeout, max_start_wait
        self._client, self._api_key = HttpClient(url, max_connections, _authorization(api_key)), api_key
        self._retrying = Retrying(max_attempts, retry_delay, Breaker(cooldown=cooldown))
        self._wants_log_probs, self._tokenizer = wants_log_probs, tokenizer
        self._weights_dir = weights_dir
        self._dialect: Dialect | None = None
        self.logprobs_mode = check_logprobs_mode(logprobs_mode)
        self._reported_mode: str | None = None
        self._is_verified = False
        self._shapes = shapes_on_disk(model)
        self._tasks: dict[str, tuple[asyncio.Task[Sampled], Request]] = {}
        self._aborted: set[str] = set()
        self._counts.update(retries=0, nonsense=0)

    @classmethod
    def from_config(cls, rollout: RolloutConfig, model: HFModelConfig, device: str = "cpu") -> Sampler:
        """From the sections ``actor_rollout_ref.rollout`` and ``actor_rollout_ref.model``, once the server is up.

        Several addresses in ``server.url`` become several replicas: what one of them loses goes to another one.
        """
        urls = addresses(rollout.server.url)
        return over_addresses(urls, rollout, model)

    @classmethod
    def one_of(
        cls,
        rollout: RolloutConfig,
        model: HFModelConfig,
        url: str,
        *,
        api: str | None = None,
        max_attempts: int | None = None,
        api_key: str | None = None,
    ) -> ServerSampler:
        """The sampler over one address, connected.

        Args:
            api_key: of a server that was started here; None is what ``server.api_key_env`` names.
        """
        server = rollout.server
        sampler = cls(
            url,
            model=str(model.path),
            api=api or server.api,
            served_model=server.model,
            timeout=server.timeout,
            max_attempts=max_attempts or server.max_attempts,
            retry_delay=server.retry_delay,
            max_connections=server.max_connections,
            max_start_wait=server.max_start_wait_time,
            api_key=api_key or _api_key(server.api_key_env),
            weights_dir=server.weights_dir,
            wants_log_probs=rollout.calculate_log_probs,
            logprobs_mode=rollout.logprobs_mode,
        )
        sampler.at_update = rollout.requests_at_update
        run_now(sampler.connect())
        return sampler

    async def connect(self) -> Dialect:
        """Detect the kind of server, and what it serves.

        Raises:
            EngineLostError: it did not come up in time.
        """
        if self._dialect is None:
            kind = await self._kind()
            if kind == "sglang" and self.api == "auto" and self.takes_images:
                raise RolloutError(
                    "SGLang keeps features of images across new weights, which settings are checked for by its name",
                    key=f"{_S}.api", got="auto", fix="Set it to sglang.",
                )  # fmt: skip
            served = self.served_model or await self._served(kind)
            self._dialect = DIALECTS[kind](self._ask, served, self._text)
            self._dialect.image_token_id = self.facts.image_token_id
            family = family_of(load_model_config(self.model)) if self.takes_images else None
            self._dialect.never_drawn = () if family is None else family.never_drawn
            if self._wants_log_probs and not self._dialect.gives_log_probs:
                self._dialect = None
                raise RolloutError(
                    f"{self.url} gives no log-probs of token ids",
                    key="actor_rollout_ref.rollout.calculate_log_probs",
                    got=True,
                    fix=f"Set it to false for evaluation, or name the server's kind: {_S}.api=vllm.",
                )
            if not self._dialect.takes_ids:
                notice(
                    f"{_S}.api",
                    f"{self.url} takes text: prompts pass a tokenizer, and a policy cannot be trained with it",
                )
        return self._dialect

    async def score(self, request: ScoreRequest) -> Scores:
        """As the base class, in one attempt: the caller has other servers.

        Raises:
            EngineLostError: no answer, or none in time.
            RolloutError: the server refuses the request, or answers another one.
        """
        dialect = await self.connect()
        if request.temperature != 1 and not dialect.scores_at_temperature:
            message = f"a server of kind {dialect.name!r} gives log-probs of a prompt at temperature 1 alone"
            raise RolloutError(
                message, key=f"{_R}.temperature", got=request.temperature, allowed=[1.0],
                fix="Set it to 1, or serve the model with a host of this library.",
            )  # fmt: skip
        path, payload = dialect.score_question(request)
        content = checked_json(await self._client.ask("POST", path, payload, self.timeout), f"{self.url}{path}")
        try:
            return dialect.scores(request, content)
        except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
            wrong = f"it has no {error}" if isinstance(error, KeyError) else str(error)
            raise RolloutError(f"the answer of {self.url}{path} cannot be used: {wrong}") from error

    async def _abort(self, request_ids: Collection[str]) -> int:
        in_flight = {name: entry for name, entry in self._tasks.items() if name in request_ids}
        if not in_flight:
            return 0
        dialect = await self.connect()
        self._aborted |= set(in_flight)
        if not await dialect.abort([dialect.key(request) for _, request in in_flight.values()]):
            for task, _ in in_flight.values():
                task.cancel()  # the server sees the end of the connection; its partial answer is lost
        return len(in_flight)

    def stats(self) -> dict[str, float]:
        """Counters; ``retries`` are attempts after the first, ``nonsense`` answers that could not be one."""
        return {**super().stats(), "retries": self._retrying.num_retries}

    async def _sample(self, request: Request) -> Sampled:
        dialect = await self.connect()
        keeps_log_probs = await self._keeps_log_probs(request)
        task = asyncio.ensure_future(self._answer(dialect, request))
        self._tasks[request.id] = (task, request)
        try:
            sampled = await asyncio.shield(task)
        except asyncio.CancelledError:
            if task.cancelled():  # by `abort`
                return Sampled((), (), "abort")
            task.cancel()
            raise
        finally:
            self._tasks.pop(request.id, None)
            self._aborted.discard(request.id)
        return sampled if keeps_log_probs else replace(sampled, log_probs=None)

    async def _answer(self, dialect: Dialect, request: Request) -> Sampled:
        stops = sorted({*self.facts.stop_token_ids, *request.sampling.stop_token_ids})
        path, payload = dialect.question(request, stops, request_seed(request, self.seed))

        async def post(content: dict[str, Any]) -> JsonObject:
            return checked_json(await self._client.ask("POST", path, content, self.timeout), f"{self.url}{path}")

        async def attempt() -> Sampled:
            if request.id in self._aborted:  # between two attempts
                return Sampled((), (), "abort")
            content = await dialect.exchange(request, payload, post)
            try:
                sampled = dialect.answer(request, content)
                wrong = invalid_reason(request, sampled, self.vocab_size)
            except (LookupError, TypeError, ValueError, AttributeError, OverflowError) as error:
                wrong = f"{type(error).__name__}: {error}"
            if wrong:
                self._counts["nonsense"] += 1
                raise EngineLostError(f"{self.url}{path} answered with nonsense: {wrong}")
            return sampled

        return await self._retrying.run(attempt)

    async def _load(self, chunks: Iterable[WeightChunk], version: int) -> None:
        dialect = await self.connect()
        if not dialect.updates_from_folder:
            await dialect.update("", version)
        await self._verify(dialect)
        check = StreamCheck(version, self._shapes)
        folder = await self._folder(dialect)
        version_folder = folder.write(check.watched(chunks), version)
        self._shapes = check.finished()
        await dialect.update(str(version_folder), version)
        folder.keep_only(version)

    async def _verify(self, dialect: Dialect) -> None:
        """Before the first update: reloading the current weights must not change anything (it does for some builds)."""
        if self._is_verified:
            return
        probe = self._probe_tokens()
        before = await dialect.prompt_log_probs(probe)
        if before is not None and await dialect.reload():
            reload_check.check_same(before, await dialect.prompt_log_probs(probe) or [])
            if self.facts.is_tied and self._shapes is not None:
                chunk = WeightChunk(0, list(reload_check.with_one_embedding(self.model)), True)
                await dialect.update(str((await self._folder(dialect)).write([chunk], 0)), 0)
                reload_check.check_uniform(
                    await dialect.prompt_log_probs(probe) or [], self.vocab_size, dialect.fix_of_reload
                )
        self._is_verified = True

    async def confirm(self, version: int) -> int:
        """The server's version; one that cannot report it has the version that was sent."""
        reported = await (await self.connect()).version()
        current = version if reported is None else reported
        if current == version:
            with self._state.updating(version):
                pass
        return current

    async def _sleep_engine(self, level: int) -> None:
        dialect = await self.connect()
        if not await dialect.sleep(level):
            notice(f"{_S}.api", f"{self.url} has no call to free its memory, so sleep frees nothing")

    async def _wake_engine(self) -> None:
        await (await self.connect()).wake()

    async def _keeps_log_probs(self, request: Request) -> bool:
        """Whether the server's log-probs are those that ``logprobs_mode`` asks for."""
        sampling, dialect = request.sampling, await self.connect()
        if not dialect.gives_log_probs:
            return False
        if sampling.is_plain or (sampling.is_greedy and sampling.is_unadjusted):
            return True  # the same in both modes
        if self._reported_mode is None:
            mode = await dialect.logprobs_mode()
            if mode is None and not self._wants_log_probs:
                return False
            self._reported_mode = mode or LOGPROBS_MODES[0 if await self._finds_processed(dialect) else 1]
        is_adjusted = self.logprobs_mode == "raw_logprobs" and dialect.raw_is_adjusted and not sampling.is_unadjusted
        if self._reported_mode == self.logprobs_mode and not is_adjusted:
            return True
        if not self._wants_log_probs:
            return False
        raise self._other_log_probs(sampling)

    def _other_log_probs(self, sampling: SamplingParams) -> RolloutError:
        """The refusal of log-probs that are not those of ``logprobs_mode``."""
        if self.logprobs_mode == self._reported_mode:
            return RolloutError(
                f"the raw log-probs of {self.url} contain the repetition penalty and the shortest response",
                key=f"{_R}.logprobs_mode",
                got=self.logprobs_mode,
                fix=f"Set it to processed_logprobs, or {_R}.repetition_penalty=1 and data.min_response_length=0.",
            )
        if self.logprobs_mode == "raw_logprobs":
            return RolloutError(
                f"{self.url} reports the log-probs of the distribution that it draws from, not raw ones",
                key=f"{_R}.logprobs_mode",
                got=self.logprobs_mode,
                fix="Start vLLM's server with --logprobs-mode raw_logprobs, SGLang's with "
                "SGLANG_RETURN_ORIGINAL_LOGPROB=1 in its environment, or set it to processed_logprobs.",
            )
        return RolloutError(
            f"{self.url} reports log-probs at temperature 1, not those of the distribution that it draws from",
            key=f"{_R}.temperature",
            got=sampling.temperature,
            fix="Start vLLM's server with --logprobs-mode processed_logprobs, or sample with temperature=1, top_p=1, "
            "top_k=-1 and no repetition penalty or shortest response, or set calculate_log_probs=false.",
        )

    async def _finds_processed(self, dialect: Dialect) -> bool:
        """Ask for the same token at temperature 0 and at nearly 0: only a scaled distribution makes it certain."""
        for number in range(4):
            prompt = tuple(self._probe_tokens()[number:])
            answers = []
            for temperature in (0.0, 0.02):
                sampling = SamplingParams(max_tokens=1, temperature=temperature, ignore_eos=dialect.takes_ids)
                request = Request(f"verl-probe-{number}-{temperature}", prompt, sampling)
                answers.append((await self._answer(dialect, request)).log_probs or (0.0,))
            if answers[0][0] < -0.1:
                return abs(answers[1][0] - answers[0][0]) > 1e-3
        return True

    def _probe_tokens(self) -> list[int]:
        return reload_check.probe_tokens(self.vocab_size, 12)

    async def _kind(self) -> str:
        await self._until_up()
        if self.api != "auto":
            return self.api
        if self._client.key is not None:
            return "verl"
        for name, path in MARKS.items():
            answer = await self._client.ask("GET", path, timeout=self.timeout)
            if 200 <= answer.status < 300:
                return name
            if answer.status == 401:
                raise RolloutError(
                    f"{self.url} asks for a key{' that is another one' if self._api_key else ''}",
                    key=f"{_S}.api_key_env",
                    fix="Name the variable that holds it. A host of this library prints the path of its key.",
                )
        return "openai"

    async def _served(self, kind: str) -> str:
        if kind in ("sglang", "tgi", "verl"):
            return self.model
        listed = await self._ask("GET", "/v1/models")
        try:
            entry = listed["data"][0]
            self.max_model_len = min(self.max_model_len, int(entry.get("max_model_len") or UNLIMITED))
            return str(entry["id"])
        except (KeyError, IndexError, TypeError, ValueError) as error:
            raise EngineLostError(f"{self.url}/v1/models answered with nonsense: {str(listed)[:200]}") from error

    async def _until_up(self) -> None:
        """Return once it answers; one of this library before the key is sent, another one only where it may be sent."""
        began, seconds, has_notice = time.monotonic(), min(5.0, self.timeout), False
        while True:
            try:
                if self._api_key and self.api in ("auto", "verl") and await self._client.proves(self._api_key, seconds):
                    self._client.key = self._api_key
                    return
                if self._api_key and self.api == "verl":
                    raise EngineLostError("the server there does not prove that it knows the key")
                answer = await self._client.ask("GET", "/health", timeout=seconds)
                if answer.status < 500:
                    return
                last = f"it answered {answer.status}"
            except EngineLostError as error:
                last = error.message
            waited = time.monotonic() - began
            if waited > self.max_start_wait:
                raise EngineLostError(
                    f"no server answers at {self.url}: {last}", key=f"{_S}.url", got=self.url,
                    fix=f"Is it running? {_S}.max_start_wait_time says how long to wait for it.",
                )  # fmt: skip
            if waited > SILENT_SECONDS and not has_notice:
                has_notice = True
                left = f"{self.max_start_wait - waited:.0f} s more ({_S}.max_start_wait_time)"
                notice(self.url, f"no server answers yet ({last}); the run waits for it, {left}")
            await asyncio.sleep(POLL_SECONDS)

    async def _ask(self, method: str, path: str, payload: Json | None = None, *, once: bool = False) -> Any:
        """A request for anything but tokens; one that changes the server is never repeated."""
        where = f"{self.url}{path}"
        seconds = UPDATE_SECONDS if method == "POST" else self.timeout

        async def attempt() -> Any:
            return checked_json(await self._client.ask(method, path, payload, seconds), where)

        return await (attempt() if once or method == "POST" else self._retrying.run(attempt))

    def _text(self) -> Tokenizer:
        if self._tokenizer is None:
            self._tokenizer = hf_tokenizer(self.model, key="actor_rollout_ref.model.path")
        return self._tokenizer

    async def _folder(self, dialect: Dialect) -> WeightFolder:
        named_folder = await dialect.weights_folder()
        if named_folder is not None:
            if self._weights_dir is not None:
                raise ConfigError(
                    "this server names the folder itself", key=f"{_S}.weights_dir", got=self._weights_dir,
                    fix="Leave it out here and start the host with --weights-dir.",
                )  # fmt: skip
            return WeightFolder(named_folder, self.model)
        if self._weights_dir is None:
            self._weights_dir = tempfile.mkdtemp(prefix="verl-weights-")
            atexit.register(shutil.rmtree, self._weights_dir, ignore_errors=True)
            notice(
                f"{_S}.weights_dir", f"not set: new weights go through {self._weights_dir}, which the server must see"
            )
        return WeightFolder(Path(env.expand(self._weights_dir)) / server_folder(self.url), self.model)


def server_folder(url: str) -> str:
    """The name of a server's folder in one that several share; each machine has another server at localhost."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    is_here = host in ("localhost", "0.0.0.0", "::", "::1") or host.startswith("127.")
    return re.sub(r"\W+", "-", f"{socket.gethostname()}-{parts.netloc}" if is_here else parts.netloc + parts.path)


def addresses(url: str | Sequence[str] | None) -> list[str]:
    """One address or several.

    Raises:
        ConfigError: none.
    """
    urls = [url] if isinstance(url, str) else list(url or [])
    if not urls:
        raise ConfigError(
            "actor_rollout_ref.rollout.name=server needs the address of a server",
            key=f"{_S}.url",
            fix=f"Set {_S}.url=http://host:port.",
        )
    return [str(one) for one in urls]


def over_addresses(
    urls: Sequence[str],
    rollout: RolloutConfig,
    model: HFModelConfig,
    api: str | None = None,
    api_key: str | None = None,
) -> Sampler:
    """One sampler over all these servers, which share a key if they have one."""
    if len(urls) == 1:
        return ServerSampler.one_of(rollout, model, urls[0], api=api, api_key=api_key)
    # Another replica answers sooner than a retry.
    samplers = {u: ServerSampler.one_of(rollout, model, u, api=api, max_attempts=1, api_key=api_key) for u in urls}
    return SamplerService(samplers, max_resends=rollout.server.max_attempts)


def _api_key(variable: str | None) -> str | None:
    if variable is None:
        return None
    key = env.get(variable)
    if key is None:
        raise ConfigError("this environment variable is not set", key=f"{_S}.api_key_env", got=variable)
    return key


def _authorization(api_key: str | None) -> Mapping[str, str]:
    return {"authorization": f"Bearer {api_key}"} if api_key else {}
