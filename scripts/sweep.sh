#!/usr/bin/env bash
# The cases that scripts/test.sh leaves out for want of time, most of them of the kernels: long on a
# small machine. Arguments go on to pytest:   scripts/sweep.sh -k gpu
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
ensure_env dev

exec .venv/bin/python -m pytest -m sweep -n "${PAGED_JAX_TEST_WORKERS:-2}" "$@"
