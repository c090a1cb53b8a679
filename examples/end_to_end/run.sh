#!/usr/bin/env bash
# From a base model to a checked one in one script, on GSM8K: supervised fine-tuning, a reward model from the policy's own
# answers, PPO with that reward model and a critic that starts from it, generation, an evaluation report beside that of the
# supervised model, export, and the exported folder loaded with transformers and, with VLLM_PYTHON=path/to/python of an
# environment that has vLLM, in vLLM's own server.
#   MODEL=..., DATA=..., OUT=... choose; PROCESSES=8 for eight GPUs, SAMPLER=hf for the built-in sampler. Not run at this
#   size. TINY=1 shrinks its sizes: see examples/tiny/settings.sh. SHOW=1 prints the settings.
set -euo pipefail
here="$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)"
source "$here/../tiny/settings.sh"
data="${DATA:-$HOME/data/gsm8k}"
model="${MODEL:-Qwen/Qwen2.5-0.5B}"
out="${OUT:-outputs/end_to_end}"
processes="${PROCESSES:-1}"
sampler="${SAMPLER:-vllm}"
sft_steps=100 rm_steps=60 ppo_steps=100
answers_tiny=() evaluation_tiny=() scorer=() reward_model_tiny=()
if [[ "${TINY:-0}" == 1 ]]; then
  out="${OUT:-$tiny/end_to_end}" model="$tiny/model"
  sft_steps=12 rm_steps=6 ppo_steps=3
  answers_tiny=(rollout.prompt_length=32 rollout.response_length=8 trainer.device=cpu)
  scorer=(--scorer "$examples/quickstart/reward.py")
  evaluation_tiny=(custom_reward_function.path="$examples/quickstart/reward.py")
  reward_model_tiny=(reward.custom_reward_function.path=null critic.ppo_micro_batch_size_per_gpu=4)
fi
train="$data/train.parquet" test="$data/test.parquet"
[[ "${TINY:-0}" == 1 ]] && train="$tiny/data/train.parquet" && test="$tiny/data/test.parquet"
sft="$out/sft/global_step_$sft_steps/model/huggingface"
rm="$out/rm/global_step_$rm_steps/model/huggingface"
# Every run below starts anew in its own folder, which its settings name last.
saves() { printf '%s\n' trainer.default_local_dir="$out/$1" trainer.total_training_steps="$2" trainer.save_freq="$2" \
  trainer.test_freq="$2" trainer.resume_mode=disable trainer.project_name=end_to_end trainer.experiment_name="$1"; }
sft_saves=() rm_saves=() ppo_saves=()
while IFS= read -r word; do sft_saves+=("$word"); done < <(saves sft "$sft_steps")
while IFS= read -r word; do rm_saves+=("$word"); done < <(saves rm "$rm_steps")
while IFS= read -r word; do ppo_saves+=("$word"); done < <(saves ppo "$ppo_steps")
say() { [[ "${SHOW:-0}" == 1 ]] || printf '\n== %s\n' "$1"; }
script() { [[ "${SHOW:-0}" == 1 ]] || python3 "$@"; }

answer() {  # MODEL PROMPTS ANSWERS SAMPLES
  run verl.trainer.main_generation data.path="$2" data.output_path="$3" data.n_samples="$4" model.path="$1" \
    rollout.name="$sampler" rollout.temperature=1.0 rollout.top_k=-1 rollout.top_p=1.0 \
    rollout.prompt_length=512 rollout.response_length=512 "${answers_tiny[@]}"
}

say "1. supervised fine-tuning"
torch=(torchrun --standalone --nnodes=1 --nproc_per_node="$processes")
[[ "$processes" == 1 ]] && torch=(python3)
launcher=("${torch[@]}")
run verl.trainer.sft_trainer \
  data.train_files="$train" data.val_files="$test" \
  data.prompt_key=extra_info data.response_key=extra_info \
  'data.prompt_dict_keys=[question]' 'data.response_dict_keys=[answer]' \
  data.train_batch_size=256 data.max_length=1024 model.path="$model" optim.lr=1e-5 \
  "${sft_tiny[@]}" "${sft_saves[@]}"

say "2. answers of that model to the training questions, and pairs out of them"
launcher=(python3)
answer "$sft" "$train" "$out/train_answers.parquet" 4
script "$here/pairs.py" "$out/train_answers.parquet" "$out/pairs.parquet" "$out/held_out_pairs.parquet" "${scorer[@]}"

say "3. a reward model"
launcher=("${torch[@]}")
run verl.trainer.rm_trainer \
  data.train_batch_size=64 data.max_length=1024 optim.lr=1e-5 rm.centering=0.01 "${pairs_tiny[@]}" \
  data.train_files="$out/pairs.parquet" data.val_files="$out/held_out_pairs.parquet" model.path="$sft" "${rm_saves[@]}"

say "4. PPO with that reward model; the critic starts from it"
launcher=(python3)
run verl.trainer.main_ppo \
  algorithm.adv_estimator=gae algorithm.use_kl_in_reward=True algorithm.kl_ctrl.kl_coef=0.05 \
  data.train_files="$train" data.val_files="$test" \
  data.train_batch_size=256 data.max_prompt_length=512 data.max_response_length=512 \
  actor_rollout_ref.rollout.name="$sampler" actor_rollout_ref.actor.optim.lr=1e-6 \
  actor_rollout_ref.actor.ppo_mini_batch_size=256 actor_rollout_ref.actor.use_dynamic_bsz=True \
  critic.optim.lr=1e-5 trainer.n_gpus_per_node="$processes" trainer.nnodes=1 \
  "${ppo_tiny[@]}" "${reward_model_tiny[@]}" \
  actor_rollout_ref.model.path="$sft" critic.model.path="$rm" \
  reward.reward_model.enable=True reward.reward_model.model_path="$rm" \
  "${ppo_saves[@]}"

say "5. answers to the test questions, before and after PPO, and a report"
trained="$out/ppo/global_step_$ppo_steps/actor"
answer "$sft" "$test" "$out/before.parquet" 4
answer "$trained/huggingface" "$test" "$out/after.parquet" 4
run verl.trainer.main_eval \
  data.path="$out/after.parquet" report.compare="$out/before.parquet" \
  report.markdown="$out/report.md" report.json="$out/report.json" report.samples="$out/samples.parquet" \
  "${evaluation_tiny[@]}"

say "6. export, and the exported folder in other hands"
[[ "${SHOW:-0}" == 1 ]] && exit
rm -rf "$out/export"
python3 -m verl.model_merger merge --local_dir "$trained" --target_dir "$out/export"
script "$here/reload.py" "$out/export" "$test" ${VLLM_PYTHON:+--vllm-python "$VLLM_PYTHON"}
echo "done: $out/report.md, $out/export"
