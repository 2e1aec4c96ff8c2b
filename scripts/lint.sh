#!/usr/bin/env bash
# What can be said about the code without running it.   scripts/lint.sh [--fix]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
ensure_env dev

if [ "${1:-}" = --fix ]; then
    .venv/bin/ruff check --fix --quiet .
    .venv/bin/ruff format --quiet .
    .venv/bin/python scripts/code_map.py
    .venv/bin/python scripts/models_table.py
fi
.venv/bin/ruff check .
.venv/bin/ruff format --check .
.venv/bin/mypy
.venv/bin/python scripts/code_map.py --check
.venv/bin/python scripts/models_table.py --check
