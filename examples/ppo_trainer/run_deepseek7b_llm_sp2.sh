#!/usr/bin/env bash
# PPO of DeepSeek-LLM-7B with a critic and sequence parallelism over two GPUs (Ulysses), for long contexts.
# Not run at this size. TINY=1 shrinks its sizes: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}"
model="${MODEL:-deepseek-ai/deepseek-llm-7b-chat}"
[[ "${TINY:-0}" == 1 ]] && ppo_tiny+=(critic.model.path="$tiny/model" critic.ppo_micro_batch_size_per_gpu=2)

run verl.trainer.main_ppo \
  algorithm.adv_estimator=gae \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=64 \
  actor_rollout_ref.actor.ulysses_sequence_parallel_size=2 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  critic.strategy=fsdp2 \
  critic.model.path="$model" \
  critic.model.use_remove_padding=True \
  critic.optim.lr=1e-5 \
  critic.ppo_micro_batch_size_per_gpu=64 \
  critic.ulysses_sequence_parallel_size=2 \
  trainer.critic_warmup=0 \
  trainer.project_name=ppo_gsm8k \
  trainer.experiment_name=deepseek_llm_7b_sp2 \
  'trainer.logger=[console,file,wandb]' \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "${ppo_tiny[@]}" "$@"
