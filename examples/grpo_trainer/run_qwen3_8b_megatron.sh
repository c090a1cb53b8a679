#!/usr/bin/env bash
# GRPO of Qwen3-8B on GSM8K: Megatron-Core for training (tensor 2, pipeline 2), vLLM for sampling. Not run at this size.
# TINY=1 shrinks its sizes: see examples/tiny/settings.sh. A shim of the tests then answers Megatron-Core's CUDA calls (run
# it from the root of the repository, or with that on PYTHONPATH).
set -euo pipefail
source "$(dirname "$0")/../tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}"
model="${MODEL:-Qwen/Qwen3-8B}"
[[ "${TINY:-0}" == 1 ]] && ppo_tiny+=(actor_rollout_ref.model.external_lib=tests.megatron.shim)

run verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.actor.strategy=megatron \
  actor_rollout_ref.ref.strategy=megatron \
  actor_rollout_ref.actor.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.actor.megatron.pipeline_model_parallel_size=2 \
  actor_rollout_ref.ref.megatron.tensor_model_parallel_size=2 \
  actor_rollout_ref.ref.megatron.pipeline_model_parallel_size=2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.001 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.n=8 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=4 \
  trainer.project_name=grpo_gsm8k \
  trainer.experiment_name=qwen3_8b_megatron \
  'trainer.logger=[console,file,wandb]' \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "${ppo_tiny[@]}" "$@"
