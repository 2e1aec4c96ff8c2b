#!/usr/bin/env bash
# Lint, then every test. Arguments go on to pytest:   scripts/test.sh -k scheduler
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
ensure_env dev

bash scripts/lint.sh
exec .venv/bin/python -m pytest -n "${PAGED_JAX_TEST_WORKERS:-2}" --dist loadfile --no-loadscope-reorder "$@"
