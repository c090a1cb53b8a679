#!/usr/bin/env bash
# SPIN of Qwen2.5-3B-Instruct on GSM8K on four GPUs. Not run at this size.
# TINY=1 shrinks its sizes, SHOW=1 prints the settings: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../../examples/tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}" # python3 examples/data_preprocess/gsm8k.py
model="${MODEL:-Qwen/Qwen2.5-3B-Instruct}"

spin_tiny=()
if [[ "${TINY:-0}" == 1 ]]; then
  spin_tiny=(actor_rollout_ref.actor.ppo_mini_batch_size=4)
fi

run recipe.spin.main_spin \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=1024 \
  data.max_response_length=1024 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2 \
  actor_rollout_ref.actor.dpo_beta=0.1 \
  actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.4 \
  trainer.ref_update_freq=1 \
  trainer.experiment_name=spin_qwen2.5_3b_gsm8k \
  trainer.n_gpus_per_node=4 \
  trainer.nnodes=1 \
  trainer.test_freq=5 \
  trainer.save_freq=20 \
  trainer.total_epochs=10 \
  "${ppo_tiny[@]}" "${spin_tiny[@]}" "$@"
