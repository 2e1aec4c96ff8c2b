#!/usr/bin/env bash
# On a machine with an accelerator: are the kernels right there, and how fast? Some minutes at most,
# the most useful first; every result is written at once.
#   scripts/device_check.sh --json OUT     PYTHON names an interpreter that has JAX
#   scripts/device_check.sh --smoke        tiny sizes: whether the script itself works, on any device
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
python=${PYTHON:-python3}
[ -n "${PYTHON:-}" ] || [ ! -x .venv/bin/python ] || python=.venv/bin/python
exec env PYTHONPATH=. "$python" scripts/device_check.py "$@"
