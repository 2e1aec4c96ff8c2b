#!/usr/bin/env bash
# Writes constraints.txt (to run) and constraints-dev.txt (to test): every package that the scripts
# install, with its version and the hashes of its files, for every Python from 3.11 on.
#   scripts/lock.sh              keeps the versions that still fit pyproject.toml
#   scripts/lock.sh --upgrade    takes the newest that fit
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh

tools=$(mktemp -d)
trap 'rm -rf "$tools"' EXIT
"$(find_python)" -m venv "$tools"
"$tools/bin/pip" install --quiet uv

compile() { # compile OUTPUT EXTRA_ARGUMENTS...
    local output=$1
    shift
    build_requirements | "$tools/bin/uv" pip compile pyproject.toml - "$@" --output-file "$output" \
        --universal --python-version 3.11 --generate-hashes --no-config --no-emit-index-url \
        --no-emit-find-links --no-annotate --no-header --quiet
    if grep -n '://' "$output"; then
        echo "$output names an address (above): it would tie every install to that place." >&2
        exit 1
    fi
    echo "$output: $(grep -c '==' "$output") packages"
}

build_requirements() {
    "$tools/bin/python" -c '
import tomllib
print(*tomllib.load(open("pyproject.toml", "rb"))["build-system"]["requires"], sep="\n")'
}

compile constraints.txt "$@"
compile constraints-dev.txt --extra dev --constraints constraints.txt "$@"
