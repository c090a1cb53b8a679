#!/usr/bin/env bash
# PPO with the critic on GPUs of its own: four for the policy, four for the critic. Not run at this size.
# TINY=1 shrinks its sizes: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}"
model="${MODEL:-Qwen/Qwen2-7B-Instruct}"
[[ "${TINY:-0}" == 1 ]] && ppo_tiny+=(critic.model.path="$tiny/model" critic.ppo_micro_batch_size_per_gpu=2)

run verl.trainer.main_ppo \
  algorithm.adv_estimator=gae \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=1024 \
  data.max_prompt_length=512 \
  data.max_response_length=512 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=16 \
  actor_rollout_ref.rollout.name=vllm \
  critic.model.path="$model" \
  critic.optim.lr=1e-5 \
  critic.ppo_micro_batch_size_per_gpu=16 \
  '+trainer.resource_pools.critic={roles: [critic], processes: [4]}' \
  trainer.project_name=ppo_gsm8k \
  trainer.experiment_name=split_placement \
  'trainer.logger=[console,file]' \
  trainer.n_gpus_per_node=4 \
  trainer.nnodes=1 \
  trainer.total_epochs=15 \
  "${ppo_tiny[@]}" "$@"
