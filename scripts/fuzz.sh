#!/usr/bin/env bash
# Thousands of requests, right and wrong ones, made from /openapi.json by schemathesis, against the
# server with an engine that needs no model: no 500, and nothing but what the description allows.
#   scripts/fuzz.sh [EXAMPLES_PER_ENDPOINT]      (installs schemathesis into .cache/fuzz, once)
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
ensure_env dev

examples=${1:-200}
tool=${SCHEMATHESIS:-.cache/fuzz/bin/schemathesis}
if [ ! -x "$tool" ]; then
    "$(find_python)" -m venv .cache/fuzz
    .cache/fuzz/bin/pip install --disable-pip-version-check --quiet 'schemathesis>=4.10,<5'
    tool=.cache/fuzz/bin/schemathesis
fi

log=$(mktemp)
.venv/bin/python -m tests.fake_engine --port 0 --delay-s 0 --max-model-len 50 --enable-admin 2>"$log" &
server=$!
trap 'kill $server 2>/dev/null || true; rm -f "$log"' EXIT
for _ in $(seq 100); do
    port=$(sed -n 's|.*Listening on http://127.0.0.1:\([0-9]*\).*|\1|p' "$log")
    [ -n "$port" ] && break
    sleep 0.1
done
[ -n "$port" ] || { cat "$log" >&2; exit 1; }

# Left out: checks of logins and resources, of which there are none, and the check that all that the
# schemas allow is taken. They cannot say that a prompt must fit into the model's context.
fuzz() { # fuzz FLAGS...: the endpoints that the flags choose
    "$tool" run "http://127.0.0.1:$port/openapi.json" --max-examples "$examples" --seed 1 \
        --phases examples,coverage,fuzzing --request-timeout 30 --continue-on-failure \
        --suppress-health-check filter_too_much "$@" \
        --checks not_a_server_error,status_code_conformance,content_type_conformance,response_headers_conformance,response_schema_conformance,negative_data_rejection,unsupported_method,allow_header_conformance
}
admin='^/(pause|resume|reset_prefix_cache|update_weights|weight_info|sleep|wake_up)$'
fuzz --exclude-path-regex "$admin"
fuzz --include-path-regex "$admin" # apart: a server that is paused answers 503
if grep -n Traceback "$log"; then
    echo "The server's log (above) holds a traceback." >&2
    exit 1
fi
kill "$server"
wait "$server"
