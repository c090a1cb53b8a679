"""Worker classes: thin registered methods, one engine or sampler call each."""

_HOMES = {
    "ActorRolloutRefWorker": "verl.workers.actor_rollout_ref",
    "CriticWorker": "verl.workers.critic",
    "ModelWorker": "verl.workers.model",
    "RewardModelWorker": "verl.workers.reward_model",
    "RolloutWorker": "verl.workers.loops",
    "SamplingWorker": "verl.workers.sampling",
    "TrainingWorker": "verl.workers.model",
}
__all__ = sorted(_HOMES)  # noqa: PLE0605


def __getattr__(name: str):
    # Loaded on demand: `verl.workers.config` and `verl.workers.reward_manager` must not pull in torch engines.
    if name in _HOMES:
        import importlib

        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'verl.workers' has no attribute {name!r}")
