"""Names of upstream that have no meaning here, and what has."""

_ENGINE = "An engine does it: verl.engines, chosen by actor_rollout_ref.actor.strategy."
_ADAPTER = "An engine merges its adapter when it exports weights: verl.models.weights.export_weights."
_VISION = "Nothing is patched here; verl.data.vision reads images and videos."
_MEGATRON = "verl.engines.megatron builds the model, and verl.models.megatron names its weights."
_SERVER = "A sampler answers requests: verl.rollout.base.Sampler; verl.rollout.vllm.sampler is vLLM's."
_SCHEDULE = "Where roles live is in trainer.resource_pools, and who waits for whom in trainer.v1.trainer_mode."

ABSENT: dict[str, str] = {
    "verl.utils.fsdp_utils.collect_lora_params": _ADAPTER,
    "verl.utils.fsdp_utils.layered_summon_lora_params": _ADAPTER,
    "verl.utils.fsdp_utils.replace_lora_wrapper": _ADAPTER,
    "verl.utils.dataset.vision_utils.process_video": "verl.data.vision.videos.load_video reads a video of a row.",
    "verl.utils.dataset.vision_utils.process_multi_modal_inputs_for_minicpmo": _VISION,
    "verl.models.transformers": _ENGINE,
    "verl.models.transformers.monkey_patch": _ENGINE,
    "verl.models.transformers.qwen2_vl": _VISION,
    "verl.models.mcore": _MEGATRON,
    "verl.utils.model.normalize_model_name": _MEGATRON,
    "verl.utils.megatron_utils.default_tp_concat_fn": _MEGATRON,
    "verl.utils.megatron.tensor_parallel": _MEGATRON,
    "verl.utils.checkpoint.megatron_checkpoint_manager": "verl.checkpoint.CheckpointWriter saves every engine's state.",
    "verl.utils.vllm.patch": _SERVER,
    "verl.third_party": _SERVER,
    "verl.third_party.vllm": _SERVER,
    "verl.workers.rollout.base": _SERVER,
    "verl.workers.rollout.vllm_rollout": _SERVER,
    "verl.workers.rollout.vllm_rollout.vllm_async_server": _SERVER,
    "verl.workers.rollout.sglang_rollout": "A sampler answers requests: verl.rollout.sglang.sampler.",
    "verl.workers.engine_workers.TrainingWorkerConfig": "verl.workers.model.ModelRole says what a worker builds.",
    "verl.workers.utils.losses.value_loss": "verl.algorithms.losses.PPOValueLoss is the critic's objective.",
    "verl.workers.utils.losses.ppo_loss": "verl.algorithms.losses.PPOPolicyLoss is the actor's objective.",
    "verl.checkpoint_engine.CheckpointEngineManager": "verl.workers.sending.WeightSender sends a rank's weights.",
    "verl.utils.distributed.set_numa_affinity": "Start the run under numactl; nothing here moves a process.",
    "verl.utils.qat": "Training with quantized weights is not built.",
    "verl.utils.transferqueue_utils": "Batches travel as verl.protocol.DataProto.",
    "verl.experimental.fully_async_policy.dynamic_schedule": _SCHEDULE,
}
