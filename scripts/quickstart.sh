#!/usr/bin/env bash
# From a fresh checkout to eight answers: makes .venv, installs, pulls SmolLM2-135M-Instruct
# (93 MB) and answers eight prompts together in one batch.
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")/.."
source scripts/env.sh
ensure_env run

.venv/bin/paged-jax pull smollm2
echo
echo "Eight prompts, answered together:"
.venv/bin/paged-jax generate smollm2 --chat --max-tokens 64 --temperature 0 \
    -p "Name three things that float on water." \
    -p "What is the capital of France?" \
    -p "Write one sentence about the moon." \
    -p "Why is the sky blue? Answer in one sentence." \
    -p "What do bees make?" \
    -p "Give me a name for a small robot." \
    -p "Translate 'good morning' into Spanish." \
    -p "What is two plus three?"
cat <<'END'

That was the engine from the command line. To serve it over HTTP, as OpenAI's clients expect:

  .venv/bin/paged-jax serve smollm2

and from another terminal:

  curl http://127.0.0.1:8000/v1/chat/completions -H 'Content-Type: application/json' \
    -d '{"model": "smollm2", "messages": [{"role": "user", "content": "Hello!"}]}'
END
