#!/usr/bin/env bash
# Hundreds of clients at once, most of them ill-behaved, on this machine alone; a minute or two.
#   scripts/soak.sh [--seconds 60] [--clients 200]
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
ensure_env dev
export JAX_PLATFORMS=cpu # a tiny model; accelerator plug-ins of the development environment stay out

exec .venv/bin/python -m tests.soak "$@"
