#!/usr/bin/env bash
# GRPO of Qwen2.5-VL-7B on Geometry3K, prompts with figures: FSDP2 for training, vLLM for sampling, one node of eight GPUs.
# MODEL=Qwen/Qwen3-VL-8B-Instruct trains that. Not run at this size.
# TINY=1 shrinks its sizes: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../tiny/settings.sh"
data="${DATA:-$HOME/data/geo3k}"   # python examples/data_preprocess/geo3k.py --local_save_dir ~/data/geo3k
model="${MODEL:-Qwen/Qwen2.5-VL-7B-Instruct}"
seeing_tiny

run verl.trainer.main_ppo \
  algorithm.adv_estimator=grpo \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.image_key=images \
  data.train_batch_size=512 \
  data.max_prompt_length=1024 \
  data.max_response_length=2048 \
  data.filter_overlong_prompts=True \
  data.truncation=error \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.enable_gradient_checkpointing=True \
  actor_rollout_ref.model.use_remove_padding=True \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.ref.strategy=fsdp2 \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=128 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=10 \
  actor_rollout_ref.actor.use_kl_loss=True \
  actor_rollout_ref.actor.kl_loss_coef=0.01 \
  actor_rollout_ref.actor.kl_loss_type=low_var_kl \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.enable_vision=True \
  actor_rollout_ref.rollout.tensor_model_parallel_size=2 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  actor_rollout_ref.rollout.n=5 \
  actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=20 \
  trainer.project_name=grpo_geo3k \
  trainer.experiment_name=qwen2_5_vl_7b_fsdp \
  'trainer.logger=[console,file,wandb]' \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.save_freq=20 \
  trainer.test_freq=5 \
  trainer.total_epochs=15 \
  "${ppo_tiny[@]}" "$@"
