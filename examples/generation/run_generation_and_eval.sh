#!/usr/bin/env bash
# Four answers of a model to every test question of GSM8K, then their evaluation: mean, pass@k, intervals, a report.
# SAMPLER=hf takes the built-in sampler. Not run at this size. TINY=1 shrinks its sizes: see examples/tiny/settings.sh.
set -euo pipefail
source "$(dirname "$0")/../tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}"
model="${MODEL:-Qwen/Qwen2.5-0.5B-Instruct}"
out="${OUT:-outputs/generation}"
generation_tiny=()
evaluation_tiny=()
if [[ "${TINY:-0}" == 1 ]]; then
  out="$tiny/generation"
  generation_tiny=(data.path="$tiny/data/test.parquet" model.path="$tiny/model"
    rollout.prompt_length=32 rollout.response_length=8 trainer.device=cpu)
  evaluation_tiny=(custom_reward_function.path="$examples/quickstart/reward.py")
fi
[[ "${SHOW:-0}" == 1 ]] || mkdir -p "$out"

run verl.trainer.main_generation \
  data.path="$data/test.parquet" \
  data.prompt_key=prompt \
  data.n_samples=4 \
  data.output_path="$out/answers.parquet" \
  model.path="$model" \
  rollout.name="${SAMPLER:-vllm}" \
  rollout.temperature=1.0 \
  rollout.top_k=50 \
  rollout.top_p=0.7 \
  rollout.prompt_length=1024 \
  rollout.response_length=1024 \
  "${generation_tiny[@]}" "$@"

[[ "${SHOW:-0}" == 1 ]] && exit
run verl.trainer.main_eval \
  data.path="$out/answers.parquet" \
  report.markdown="$out/report.md" \
  report.json="$out/report.json" \
  report.samples="$out/samples.parquet" \
  "${evaluation_tiny[@]}"
