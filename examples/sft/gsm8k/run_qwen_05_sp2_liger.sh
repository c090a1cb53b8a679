#!/usr/bin/env bash
# Supervised fine-tuning of Qwen2.5-0.5B on GSM8K with sequence parallelism over two GPUs and Liger kernels. NPROC=8 for
# eight GPUs. Not run at this size. TINY=1 shrinks its sizes: see examples/tiny/settings.sh. Liger's kernels need a GPU, so
# on a CPU it is refused; model.use_liger=False trains the rest of it there.
set -euo pipefail
source "$(dirname "$0")/../../tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}"
model="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
processes="${NPROC:-2}"
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
  model.use_liger=True \
  model.use_remove_padding=True \
  engine.ulysses_sequence_parallel_size=2 \
  optim.lr=1e-4 \
  trainer.project_name=gsm8k-sft \
  trainer.experiment_name=qwen2.5-0.5b-sp2-liger \
  'trainer.logger=[console,file]' \
  trainer.total_epochs=1 \
  "${sft_tiny[@]}" "$@"
