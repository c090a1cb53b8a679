#!/usr/bin/env bash
# GRPO with rollout importance sampling: the sampler computes in bfloat16, the trainer in float32.
#
#   bash examples/rollout_importance_sampling/run_with_rollout_is.sh                       # as it stands: a CPU will do
#   LEVEL=sequence MODE=mask bash examples/rollout_importance_sampling/run_with_rollout_is.sh
#   METRICS_ONLY=1 bash examples/rollout_importance_sampling/run_with_rollout_is.sh
#   MODEL_PATH=Qwen/Qwen2.5-0.5B-Instruct TRAIN_FILES=~/data/gsm8k/train.parquet VAL_FILES=~/data/gsm8k/test.parquet \
#       bash examples/rollout_importance_sampling/run_with_rollout_is.sh data.max_response_length=512
#
# Without MODEL_PATH a small model is made and warmed up on additions first (one or two minutes; TINY=1: in seconds, and
# one step). Everything after the script's name goes to verl.trainer.main_ppo and wins over what stands here. SHOW=1
# prints these settings and runs nothing.
set -euo pipefail

here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
root=$(cd "$here/../.." && pwd)
quickstart=$root/examples/quickstart
python=${PYTHON:-$(command -v python || command -v python3)}
out=${OUT:-outputs/rollout_is}
export PYTHONPATH=$root${PYTHONPATH:+:$PYTHONPATH}
export VERL_FILE_LOGGER_ROOT=$out/logs

# token: one ratio per token, the usual beginning. sequence: the product over a response, for THRESHOLD 2 to 10.
# geometric: the mean of a response's ratios, very close to 1, so THRESHOLD 1.0002 to 1.001, with MODE=mask.
level=${LEVEL:-token}
mode=${MODE:-truncate}
threshold=${THRESHOLD:-2.0}
apply=true
steps=20
if [[ ${TINY:-0} == 1 ]]; then
    unset MODEL_PATH
    WARM_UP_STEPS=${WARM_UP_STEPS:-2} steps=1
fi
if [[ -n ${METRICS_ONLY:-} ]]; then apply=false; fi

task=()
if [[ -z ${MODEL_PATH:-} ]]; then
    export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1} # a model of this size gains nothing from a second thread
    warm_up=${WARM_UP_STEPS:-240}
    MODEL_PATH=$out/sft/global_step_$warm_up/model/huggingface
    TRAIN_FILES=$out/data/train.parquet VAL_FILES=$out/data/test.parquet
    task=(
        data.train_batch_size=32
        data.max_prompt_length=32
        data.max_response_length=8
        actor_rollout_ref.actor.ppo_mini_batch_size=32
        actor_rollout_ref.actor.optim.lr=2e-4
        "reward.custom_reward_function.path=$quickstart/reward.py"
    )
    if [[ ! -d $MODEL_PATH && ${SHOW:-0} != 1 ]]; then
        "$python" "$quickstart/../data_preprocess/arithmetic.py" --local_save_dir "$out/data" --train_size 3072 --sft_size 4096
        "$python" "$quickstart/demonstrations.py" "$out/data/sft.parquet" "$out/data/demonstrations.parquet"
        "$python" "$quickstart/model.py" "$out/base"
        "$python" -m verl.trainer.sft_trainer \
            "data.train_files=$out/data/demonstrations.parquet" \
            data.train_batch_size=128 \
            data.max_length=32 \
            "model.path=$out/base" \
            optim.lr=3e-3 \
            optim.lr_scheduler_type=cosine \
            "trainer.total_training_steps=$warm_up" \
            "trainer.save_freq=$warm_up" \
            "trainer.default_local_dir=$out/sft" \
            trainer.project_name=rollout_is \
            trainer.experiment_name=sft \
            "trainer.logger=[file]" \
            trainer.resume_mode=disable \
            "checkpoint.save_contents=[model]"
    fi
else
    task=(
        data.train_batch_size=64
        data.max_prompt_length=512
        actor_rollout_ref.actor.ppo_mini_batch_size=64
        actor_rollout_ref.actor.optim.lr=1e-6
    )
fi

words=(
    algorithm.adv_estimator=grpo
    "algorithm.rollout_is_threshold=$threshold"
    "algorithm.rollout_is=$apply"
    algorithm.rollout_is_threshold_lower=null
    "algorithm.rollout_is_level=$level"
    "algorithm.rollout_is_mode=$mode"
    algorithm.rollout_is_veto_threshold=1e-4
    actor_rollout_ref.rollout.calculate_log_probs=true
    actor_rollout_ref.rollout.dtype=bfloat16
    actor_rollout_ref.rollout.n=8
    "actor_rollout_ref.model.path=$MODEL_PATH"
    "data.train_files=$TRAIN_FILES"
    "data.val_files=${VAL_FILES:-[]}"
    "trainer.total_training_steps=$steps"
    trainer.test_freq=10
    "trainer.default_local_dir=$out/grpo"
    trainer.project_name=rollout_is
    "trainer.experiment_name=${level}_$mode"
    "trainer.logger=[console,file]"
    trainer.resume_mode=disable
    "${task[@]}"
    "$@"
)
if [[ ${SHOW:-0} == 1 ]]; then
    printf '%s\n' "${words[@]}"
    exit
fi
"$python" -m verl.trainer.main_ppo "${words[@]}"
"$python" "$here/show_mismatch.py" "$out/logs/rollout_is/${level}_$mode.jsonl"
