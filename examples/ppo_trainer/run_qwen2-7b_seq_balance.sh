#!/usr/bin/env bash
# PPO of Qwen2-7B with a critic: sequences packed without padding, micro-batches by tokens, tokens balanced over GPUs.
# Not run at this size. TINY=1 shrinks its sizes: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}"
model="${MODEL:-Qwen/Qwen2-7B-Instruct}"
[[ "${TINY:-0}" == 1 ]] && ppo_tiny+=(critic.model.path="$tiny/model")

run verl.trainer.main_ppo \
  algorithm.adv_estimator=gae \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=4096 \
  data.max_prompt_length=4096 \
  data.max_response_length=4096 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=512 \
  actor_rollout_ref.actor.use_dynamic_bsz=True \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=24000 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.5 \
  actor_rollout_ref.rollout.log_prob_max_token_len_per_gpu=24000 \
  critic.model.path="$model" \
  critic.model.use_remove_padding=True \
  critic.optim.lr=1e-5 \
  critic.ppo_max_token_len_per_gpu=98304 \
  trainer.critic_warmup=0 \
  trainer.balance_batch=True \
  trainer.project_name=ppo_gsm8k \
  trainer.experiment_name=qwen2_7b_seq_balance \
  'trainer.logger=[console,file,wandb]' \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "${ppo_tiny[@]}" "$@"
