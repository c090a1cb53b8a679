#!/usr/bin/env bash
# Rewrites the code in the house format and applies the safe fixes of the linter.
set -euo pipefail
cd "$(dirname "$0")/.."
ruff="ruff"
[ -x .venv/bin/ruff ] && ruff=".venv/bin/ruff"
"$ruff" check --fix .
"$ruff" format .
