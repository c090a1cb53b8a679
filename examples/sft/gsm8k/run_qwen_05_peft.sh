#!/usr/bin/env bash
# Supervised fine-tuning of Qwen2.5-0.5B on GSM8K with LoRA. Usage: bash run_qwen_05_peft.sh [settings], NPROC=8 for eight
# GPUs. Not run at this size. TINY=1 shrinks its sizes: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../../tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}"
model="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
processes="${NPROC:-1}"
launcher=(torchrun --standalone --nnodes=1 --nproc_per_node="$processes")

run verl.trainer.sft_trainer \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.prompt_key=extra_info \
  data.response_key=extra_info \
  'data.prompt_dict_keys=[question]' \
  'data.response_dict_keys=[answer]' \
  data.train_batch_size=256 \
  data.micro_batch_size_per_gpu=4 \
  model.path="$model" \
  model.lora_rank=32 \
  model.lora_alpha=16 \
  model.target_modules=all-linear \
  optim.lr=1e-4 \
  trainer.project_name=gsm8k-sft \
  trainer.experiment_name=qwen2.5-0.5b-peft \
  'trainer.logger=[console,file]' \
  trainer.total_epochs=1 \
  "${sft_tiny[@]}" "$@"
