#!/usr/bin/env bash
# DAPO of Qwen2.5-32B with truncated importance sampling between the sampler and the trainer. Not run at this size.
# `algorithm.rollout_is_*` replaces the former actor setting tis_imp_ratio_cap: docs/advance/rollout_is_migration.md.
# TINY=1 shrinks its sizes, SHOW=1 prints the settings.
set -euo pipefail

exec bash "$(dirname "$0")/run_dapo_qwen2.5_32b.sh" \
  algorithm.rollout_is_threshold="${THRESHOLD:-2.0}" \
  algorithm.rollout_is=true \
  algorithm.rollout_is_threshold_lower=null \
  algorithm.rollout_is_level="${LEVEL:-token}" \
  algorithm.rollout_is_mode="${MODE:-truncate}" \
  algorithm.rollout_is_veto_threshold=1e-4 \
  actor_rollout_ref.rollout.calculate_log_probs=true \
  trainer.experiment_name="dapo_qwen2.5_32b_tis" \
  "$@"
