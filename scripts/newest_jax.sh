#!/usr/bin/env bash
# The kernels' tests on a JAX newer than the locked one. It wants Python 3.12 and an environment of
# its own, .venv-newest, which is not locked: what fits pyproject.toml, with this JAX.
#   scripts/newest_jax.sh                  the contract and every compile for TPUs and GPUs
#   scripts/newest_jax.sh -k gpu           arguments go on to pytest
#   JAX_VERSION=0.11.2 PYTHON=python3.13 scripts/newest_jax.sh
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
version=${JAX_VERSION:-0.11.2} # the newest that the kernels were tried on
venv=.venv-newest

if [ "$("$venv/bin/python" -c 'import jax; print(jax.__version__)' 2>/dev/null)" != "$version" ]; then
    python=${PYTHON:-python3.12}
    if ! "$python" -c 'import sys; sys.exit(sys.version_info < (3, 12))' 2>/dev/null; then
        echo "JAX $version wants Python 3.12 or newer, which $python is not. Name one:" >&2
        echo "  PYTHON=/path/to/python3.12 $0" >&2
        exit 1
    fi
    echo "Making $venv with JAX $version (about 2 GB) ..."
    rm -rf "$venv"
    "$python" -m venv "$venv"
    "$venv/bin/python" -m pip install --disable-pip-version-check --quiet \
        --editable '.[dev]' "jax==$version"
fi
exec "$venv/bin/python" -m pytest -n "${PAGED_JAX_TEST_WORKERS:-2}" \
    tests/test_kernels_*.py tests/test_tpu_*.py tests/test_gpu_*.py "$@"
