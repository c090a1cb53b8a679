"""The `sglang` sampler: an SGLang server, one that runs already or one that is started here."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Mapping
from typing import Any

from verl.config.schema.model import HFModelConfig
from verl.config.schema.rollout import RolloutConfig
from verl.errors import ConfigError, MissingDependencyError
from verl.outcomes import on_error, run_now
from verl.ports import free_port
from verl.rollout.base import Sampler
from verl.rollout.server.process import ServerProcess
from verl.rollout.server.sampler import ServerSampler, addresses, over_addresses

_R = "actor_rollout_ref.rollout"
RAW = "SGLANG_RETURN_ORIGINAL_LOGPROB"
"""Makes SGLang report log-probs of before the temperature."""
FEATURES = "SGLANG_VLM_CACHE_SIZE_MB"
"""Features of images that SGLang keeps, also across new weights, when it flushes everything else."""
_SIZE = f"Set {_R}.%s, from which the server's devices are counted."
OURS = {
    **dict.fromkeys(("tp-size", "tp", "tensor-parallel-size"), _SIZE % "tensor_model_parallel_size"),
    **dict.fromkeys(("pp-size", "pp", "pipeline-parallel-size"), _SIZE % "pipeline_model_parallel_size"),
    **dict.fromkeys(("ep-size", "ep", "expert-parallel-size"), _SIZE % "expert_parallel_size"),
    **dict.fromkeys(("dp-size", "dp", "data-parallel-size"), "Leave it out: several replicas share the requests."),
    **dict.fromkeys(("model-path", "model", "host", "port", "device", "nnodes", "node-rank"), "Leave it out."),
}
"""Flags by which a server would not be where it is looked for, or not on the devices of its replica; and what to do."""


class SGLangSampler(ServerSampler):
    """Samples with SGLang over its native interface.

    ``rollout.server.url`` names servers that run; without it one is started on this machine, with the settings of the
    rollout section and ``engine_kwargs.sglang`` as its arguments, and ended with this process.
    """

    process: ServerProcess | None = None

    @classmethod
    def from_config(cls, rollout: RolloutConfig, model: HFModelConfig, device: str = "cpu") -> Sampler:
        if rollout.server.url:
            return over_addresses(addresses(rollout.server.url), rollout, model, api="sglang")
        if importlib.util.find_spec("sglang") is None:
            raise MissingDependencyError(
                "SGLang is not installed",
                key=f"{_R}.name",
                got="sglang",
                fix=f"pip install sglang, or name a server that runs: {_R}.server.url=http://host:30000.",
            )
        port = free_port()
        variables = {FEATURES: "0", **({RAW: "1"} if rollout.logprobs_mode == "raw_logprobs" else {})}
        process = ServerProcess.foreign(command(rollout, model, device, port), port, variables, "sglang.launch_server")
        with on_error(lambda _: process.close()):
            run_now(process.wait_until_up(rollout.server.max_start_wait_time))
            sampler = cls.one_of(rollout, model, process.url, api="sglang")
        sampler.process = process  # type: ignore[attr-defined]  # of this class
        return sampler

    def close(self) -> None:
        """End the server, if it was started here."""
        if self.process is not None:
            self.process.close()


def command(rollout: RolloutConfig, model: HFModelConfig, device: str, port: int) -> list[str]:
    """The command line of SGLang's server (https://docs.sglang.ai/advanced_features/server_arguments.html)."""
    auto = "float32" if device == "cpu" else "bfloat16"
    flags: dict[str, Any] = {
        "model-path": str(model.path),
        "host": "127.0.0.1",
        "port": port,
        "dtype": auto if rollout.dtype == "auto" else rollout.dtype,
        "random-seed": rollout.seed,
        "tp-size": rollout.tensor_model_parallel_size,
        "pp-size": rollout.pipeline_model_parallel_size,
        "ep-size": rollout.expert_parallel_size,
        "mem-fraction-static": rollout.gpu_memory_utilization,
        "max-running-requests": rollout.max_num_seqs,
        "context-length": rollout.max_model_len,
        "quantization": rollout.quantization,
        "device": device,
        "trust-remote-code": bool(model.trust_remote_code),
        "disable-cuda-graph": bool(rollout.enforce_eager),
        "disable-radix-cache": not rollout.enable_prefix_caching,
        "enable-memory-saver": bool(rollout.free_cache_engine) and device != "cpu",
    }
    return [sys.executable, "-m", "sglang.launch_server", *as_flags({**flags, **_user(rollout)})]


def as_flags(values: Mapping[str, Any]) -> list[str]:
    """``{"a-b": 1, "c": True, "d": None}`` -> ``["--a-b", "1", "--c"]``."""
    flags: list[str] = []
    for name, value in values.items():
        if value is True:
            flags.append(f"--{name}")
        elif value is not None and value is not False:
            flags += [f"--{name}", str(value)]
    return flags


def _user(rollout: RolloutConfig) -> dict[str, Any]:
    """``engine_kwargs.sglang`` as flags.

    Raises:
        ConfigError: one of them has its own key, or is set by what started the server.
    """
    flags = {}
    for name, value in (rollout.engine_kwargs.sglang or {}).items():
        flag = name.replace("_", "-")
        if flag in OURS:
            raise ConfigError(
                "this argument of SGLang's server is set by the sampler itself",
                key=f"{_R}.engine_kwargs.sglang.{name}",
                got=value,
                fix=OURS[flag],
            )
        flags[flag] = value
    return flags
