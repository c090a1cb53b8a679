# Read by the example scripts. With TINY=1 it makes a model of one million parameters and a few additions below
# ${TINY_DIR:-outputs/tiny} and fills ppo_tiny, sft_tiny or pairs_tiny with small sizes, that data and no GPU. The engine,
# the sampler and the number of processes stay as the script has them: where one of them cannot run, the command says so.
# Settings behind the script's name replace them. Without TINY=1 the three are empty.
#
#   TINY=1 bash SCRIPT                        run it in small; most want vLLM and start eight processes
#   TINY=1 bash SCRIPT actor_rollout_ref.rollout.name=hf trainer.n_gpus_per_node=1
#                                             another run: the built-in sampler, one process
#   SHOW=1 bash SCRIPT                        print the settings, one per line, and run nothing

examples="$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)"
ppo_tiny=()
sft_tiny=()
pairs_tiny=()

if [[ "${TINY:-0}" == 1 ]]; then
  tiny="${TINY_DIR:-outputs/tiny}"
  if [[ ! -f "$tiny/ready" ]]; then
    python3 "$examples/quickstart/model.py" "$tiny/model" > /dev/null
    python3 "$examples/data_preprocess/arithmetic.py" --local_save_dir "$tiny/data" \
      --train_size 64 --val_size 16 --sft_size 64 > /dev/null
    python3 "$examples/tiny/pairs.py" "$tiny/data/pairs.parquet"
    touch "$tiny/ready"
  fi
  on_cpu=(trainer.device=cpu 'trainer.logger=[console,file]' trainer.default_local_dir="$tiny/checkpoints"
    trainer.resume_mode=disable)
  ppo_tiny=(
    data.train_files="$tiny/data/train.parquet" data.val_files="$tiny/data/test.parquet"
    data.train_batch_size=8 data.max_prompt_length=32 data.max_response_length=8
    actor_rollout_ref.model.path="$tiny/model" actor_rollout_ref.rollout.n=2
    actor_rollout_ref.actor.ppo_mini_batch_size=8 actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=2
    actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu=2
    reward.custom_reward_function.path="$examples/quickstart/reward.py"
    trainer.total_training_steps=1 trainer.save_freq=-1 trainer.test_freq=1 "${on_cpu[@]}"
  )
  sft_tiny=(
    data.train_files="$tiny/data/sft.parquet" data.val_files="$tiny/data/sft.parquet" data.prompt_key=null
    data.response_key=null data.prompt_dict_keys=null data.response_dict_keys=null
    data.train_batch_size=8 data.max_length=32 model.path="$tiny/model"
    trainer.total_training_steps=1 trainer.save_freq=-1 trainer.test_freq=1 "${on_cpu[@]}"
  )
  pairs_tiny=(
    data.train_files="$tiny/data/pairs.parquet" data.val_files="$tiny/data/pairs.parquet"
    data.train_batch_size=8 data.max_length=32 model.path="$tiny/model"
    trainer.total_training_steps=1 trainer.save_freq=-1 trainer.test_freq=1 "${on_cpu[@]}"
  )
fi

# In small: a model that sees, and pictures with questions about a colour, for ppo_tiny.
seeing_tiny() {
  [[ "${TINY:-0}" == 1 ]] || return 0
  if [[ ! -f "$tiny/sees/ready" ]]; then
    python3 "$examples/vision/make_model.py" "$tiny/sees/model" > /dev/null
    python3 "$examples/vision/make_data.py" --save_dir "$tiny/sees/data" \
      --train_size 64 --test_size 16 --sft_size 8 --pairs_size 8 > /dev/null
    touch "$tiny/sees/ready"
  fi
  ppo_tiny+=(
    data.train_files="$tiny/sees/data/train.parquet" data.val_files="$tiny/sees/data/test.parquet"
    data.max_prompt_length=64 actor_rollout_ref.model.path="$tiny/sees/model"
    reward.custom_reward_function.path="$examples/vision/reward.py"
  )
}

# Run `python3 -m MODULE settings...`, or `torchrun ... -m MODULE settings...` where the script sets launcher.
run() {
  if [[ "${SHOW:-0}" == 1 ]]; then
    shift
    printf '%s\n' "$@"
    return
  fi
  "${launcher[@]:-python3}" -m "$@"
}
