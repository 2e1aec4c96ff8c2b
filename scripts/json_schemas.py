"""How many of 100 random JSON schemas a small model's output parses for and conforms to.

    .venv/bin/python scripts/json_schemas.py [COUNT]

SmolLM2 answers each over HTTP, once streaming and once not, sixteen at a time. Exit code 1 unless
all of them do, and both ways say the same.
"""

import asyncio
import json
import sys
from pathlib import Path

import openai

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from paged_jax import AsyncEngine, EngineConfig
from tests.live_server import live_server, wait_until
from tests.random_schemas import conforms, random_schema

MAX_TOKENS = 700


async def answer(client: openai.AsyncOpenAI, seed: int, *, stream: bool) -> str:
    schema = random_schema(seed)
    asked = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": f"Make up something of this form: {schema}"}],
        "response_format": {
            "type": "json_schema",
            "json_schema": {"name": "something", "schema": schema},
        },
        "max_tokens": MAX_TOKENS,
        "seed": seed,
    }
    if not stream:
        return (await client.chat.completions.create(**asked)).choices[0].message.content
    pieces = await client.chat.completions.create(stream=True, **asked)
    return "".join([piece.choices[0].delta.content or "" async for piece in pieces])


async def run(url: str, count: int) -> int:
    turn = asyncio.Semaphore(16)
    num_right = 0

    async def one(seed: int) -> None:
        nonlocal num_right
        async with turn:
            whole = await answer(client, seed, stream=False)
            streamed = await answer(client, seed, stream=True)
        try:
            right = conforms(json.loads(whole), random_schema(seed)) and streamed == whole
        except ValueError:
            right = False
        num_right += right
        if not right:
            print(f"schema {seed}: {random_schema(seed)}\n  {whole!r}\n  {streamed!r}")

    async with openai.AsyncOpenAI(
        base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=3600
    ) as client:
        await asyncio.gather(*[one(seed) for seed in range(count)])
    print(f"{num_right} of {count} schemas: the output parses and conforms, streaming and not")
    return 0 if num_right == count else 1


def main() -> int:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    config = EngineConfig(model="smollm2", max_model_len=2048, max_num_seqs=16)
    with live_server(AsyncEngine(config), ready=False) as server:
        wait_until(lambda: server.request("GET", "/health")[0] == 200, within_s=1800)
        return asyncio.run(run(server.url, count))


if __name__ == "__main__":
    sys.exit(main())
