"""The environment of Ray workers under upstream's path."""

from typing import Any

from verl import env

PPO_RAY_RUNTIME_ENV = {
    "env_vars": {"TOKENIZERS_PARALLELISM": "true", "NCCL_DEBUG": "WARN", "VLLM_LOGGING_LEVEL": "WARN"}
}


def get_ppo_ray_runtime_env() -> dict[str, Any]:
    """For ``ray.init(runtime_env=...)``; what the shell has set is left to it."""
    unset = {name: value for name, value in PPO_RAY_RUNTIME_ENV["env_vars"].items() if env.get(name) is None}
    return {"env_vars": unset}
