#!/usr/bin/env bash
# PRIME of Eurus-2-7B-SFT on Eurus-2-RL-Data, with the settings of the paper: one node of eight GPUs. Not run at this size.
# TINY=1 shrinks its sizes, SHOW=1 prints the settings: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../../examples/tiny/settings.sh"
data="${DATA:-$HOME/data}" # eurus2_train.parquet and eurus2_test.parquet, in the format of docs/howto/data.md
model="${MODEL:-PRIME-RL/Eurus-2-7B-SFT}"

prime_tiny=()
if [[ "${TINY:-0}" == 1 ]]; then
  model="$tiny/model"
  prime_tiny=(data.oversample_factor=2 reward_model.mini_batch_size=8)
fi

run recipe.prime.main_prime \
  data.train_files="$data/eurus2_train.parquet" \
  data.val_files="$data/eurus2_test.parquet" \
  data.train_batch_size=64 \
  data.max_prompt_length=1024 \
  data.max_response_length=3072 \
  data.filter_overlong_prompts=true \
  data.filter_accuracy=true \
  data.accuracy_lower_bound=0.2 \
  data.accuracy_upper_bound=0.8 \
  data.oversample_factor=4 \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.model.enable_gradient_checkpointing=true \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=64 \
  actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=1 \
  actor_rollout_ref.actor.optim.lr=5e-7 \
  actor_rollout_ref.actor.fsdp_config.param_offload=true \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.n=4 \
  actor_rollout_ref.rollout.tensor_model_parallel_size=1 \
  actor_rollout_ref.rollout.gpu_memory_utilization=0.6 \
  reward_model.model.path="$model" \
  reward_model.model.update=before \
  reward_model.model.beta_train=0.05 \
  reward_model.model.optim.lr=1e-6 \
  reward_model.model.optim.grad_clip=10.0 \
  reward_model.model.fsdp_config.param_offload=true \
  reward_model.model.fsdp_config.optimizer_offload=true \
  reward_model.strategy=fsdp2 \
  reward_model.micro_batch_size_per_gpu=1 \
  reward_model.mini_batch_size=64 \
  reward_model.prime_granularity=token \
  reward_model.prime_norm=batch_norm \
  reward.reward_manager.name=prime \
  trainer.experiment_name=prime_eurus2_7b \
  'trainer.logger=[console,file,wandb]' \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=1 \
  trainer.test_freq=16 \
  trainer.save_freq=64 \
  trainer.total_epochs=1 \
  "${ppo_tiny[@]}" "${prime_tiny[@]}" "$@"
