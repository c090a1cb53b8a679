#!/usr/bin/env bash
# Direct preference optimisation of Qwen2.5-0.5B on HH-RLHF. NPROC=8 for eight GPUs. Not run at this size.
# TINY=1 shrinks its sizes: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../tiny/settings.sh"
# python examples/data_preprocess/full_hh_rlhf.py --split rm --local_save_dir ~/data/full_hh_rlhf
data="${DATA:-$HOME/data/full_hh_rlhf/rm}"
model="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
launcher=(torchrun --standalone --nnodes=1 --nproc_per_node="${NPROC:-1}")

run verl.trainer.dpo_trainer \
  data.train_files="$data/train.parquet" \
  data.val_files="$data/test.parquet" \
  data.train_batch_size=64 \
  data.max_length=1024 \
  data.filter_invalid=True \
  model.path="$model" \
  model.enable_gradient_checkpointing=True \
  dpo.beta=0.1 \
  dpo.loss_type=sigmoid \
  dpo.precompute_ref_log_probs=True \
  optim.lr=5e-7 \
  trainer.project_name=dpo \
  trainer.experiment_name=qwen2.5_0.5b_hh \
  'trainer.logger=[console,file]' \
  trainer.total_epochs=1 \
  trainer.save_freq=500 \
  trainer.test_freq=100 \
  "${pairs_tiny[@]}" "$@"
