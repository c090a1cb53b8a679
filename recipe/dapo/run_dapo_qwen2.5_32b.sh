#!/usr/bin/env bash
# DAPO of Qwen2.5-32B on DAPO-Math-17k, with the numbers of the paper: sixteen nodes of eight GPUs. Not run at this size.
# Four GPUs hold a vLLM engine together.
# TINY=1 shrinks its sizes, SHOW=1 prints the settings: see examples/tiny/settings.sh. Ulysses over eight processes becomes
# one over four there, as the small model has four heads.
set -euo pipefail
source "$(dirname "$0")/../../examples/tiny/settings.sh"
data="${DATA:-$HOME/data}" # dapo-math-17k.parquet and aime-2024.parquet, in the format of docs/howto/data.md
model="${MODEL:-Qwen/Qwen2.5-32B}"
prompt=2048
response=20480
overlong=4096

dapo_tiny=()
if [[ "${TINY:-0}" == 1 ]]; then # an untrained model is never right, but its answers differ in length
  dapo_tiny=(
    data.gen_batch_size=16 data.prompt_key=prompt actor_rollout_ref.rollout.n=4
    actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=4
    actor_rollout_ref.rollout.val_kwargs.n=1 algorithm.filter_groups.metric=seq_reward
    +reward.reward_kwargs.overlong_buffer_cfg.len=4 +reward.reward_kwargs.max_resp_len=8
  )
fi

run recipe.dapo.main_dapo \
  data.train_files="$data/dapo-math-17k.parquet" \
  data.val_files="$data/aime-2024.parquet" \
  data.prompt_key=prompt \
  data.truncation=left \
  data.train_batch_size=512 \
  data.gen_batch_size=1536 \
  data.max_prompt_length="$prompt" \
  data.max_response_length="$response" \
  actor_rollout_ref.model.path="$model" \
  actor_rollout_ref.model.use_remove_padding=true \
  actor_rollout_ref.model.enable_gradient_checkpointing=true \
  actor_rollout_ref.actor.strategy=fsdp2 \
  actor_rollout_ref.actor.ppo_mini_batch_size=32 \
  actor_rollout_ref.actor.use_dynamic_bsz=true \
  actor_rollout_ref.actor.ppo_max_token_len_per_gpu=$((prompt + response)) \
  actor_rollout_ref.actor.fsdp_config.ulysses_sequence_parallel_size=8 \
  actor_rollout_ref.actor.fsdp_config.param_offload=true \
  actor_rollout_ref.actor.fsdp_config.optimizer_offload=true \
  actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.optim.lr_warmup_steps=20 \
  actor_rollout_ref.actor.optim.weight_decay=0.1 \
  actor_rollout_ref.actor.grad_clip=1.0 \
  actor_rollout_ref.rollout.name=vllm \
  actor_rollout_ref.rollout.tensor_model_parallel_size=4 \
  actor_rollout_ref.rollout.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.do_sample=true \
  actor_rollout_ref.rollout.val_kwargs.temperature=1.0 \
  actor_rollout_ref.rollout.val_kwargs.top_p=0.7 \
  actor_rollout_ref.rollout.val_kwargs.n=32 \
  +reward.reward_kwargs.overlong_buffer_cfg.enable=true \
  +reward.reward_kwargs.overlong_buffer_cfg.len="$overlong" \
  +reward.reward_kwargs.overlong_buffer_cfg.penalty_factor=1.0 \
  +reward.reward_kwargs.max_resp_len="$response" \
  trainer.experiment_name=dapo_qwen2.5_32b \
  'trainer.logger=[console,file,wandb]' \
  trainer.n_gpus_per_node=8 \
  trainer.nnodes=16 \
  trainer.test_freq=5 \
  trainer.save_freq=5 \
  trainer.total_epochs=10 \
  "${ppo_tiny[@]}" "${dapo_tiny[@]}" "$@"
