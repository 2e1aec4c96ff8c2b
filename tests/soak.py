"""Many clients at once, most of them ill-behaved, against a server process with a real engine.

    python -m tests.soak --seconds 60 --clients 200

A first server is run for some time, then must be as it was before; a second one gets SIGTERM in the
middle. What clients saw is checked against a float64 oracle and against the rules of a stream.
"""

import argparse
import asyncio
import contextlib
import json
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from prometheus_client.parser import text_string_to_metric_families

from tests.oracle_llama import llama_logits
from tests.tiny_models import llama_tensors, write_tiny_llama
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

ROOT = Path(__file__).resolve().parent.parent
MAX_MODEL_LEN, MAX_BODY, MAX_GROWTH_MB, NUM_TOKENS = 256, 2**20, 50, 12
LEAD = 1e-3  # by which the best token must win, or rounding may decide
COMPLETIONS = "/v1/completions"


@dataclass
class Findings:
    """What the clients saw; `wrong` must stay empty."""

    seen: Counter[str] = field(default_factory=Counter)
    wrong: list[str] = field(default_factory=list)

    def expect(self, holds: object, what: str) -> None:
        if not holds:
            self.wrong.append(what)


# A client


@dataclass
class Connection:
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def send(self, path: str, body: bytes, *, declared: int | None = None) -> None:
        length = len(body) if declared is None else declared
        lines = (
            f"POST {path} HTTP/1.1",
            "Host: t",
            "Connection: close",
            f"Content-Length: {length}",
        )
        self.writer.write("\r\n".join((*lines, "\r\n")).encode() + body)
        await self.writer.drain()

    async def status(self) -> int:
        head = await self.reader.readuntil(b"\r\n\r\n")
        return int(head.split(b" ", 2)[1])

    async def rest(self) -> bytes:
        return await self.reader.read()


@contextlib.asynccontextmanager
async def connected(port: int, **options: Any) -> AsyncIterator[Connection]:
    reader, writer = await asyncio.open_connection("127.0.0.1", port, **options)
    try:
        yield Connection(reader, writer)
    finally:
        writer.close()
        with contextlib.suppress(OSError):
            await writer.wait_closed()


def events_of(chunked: bytes) -> list[Any]:
    """The events of a chunked stream that was read to its end."""
    data = b""
    while chunked:
        size, _, chunked = chunked.partition(b"\r\n")
        data, chunked = data + chunked[: int(size, 16)], chunked[int(size, 16) + 2 :]
    lines = [line.removeprefix(b"data: ") for line in data.split(b"\n\n") if line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines]


def check_ending(events: list[Any], n: int, findings: Findings) -> None:
    """One end for each choice, or one error for all; then `[DONE]`, once and last."""
    findings.expect(events and events[-1] == b"[DONE]", f"no [DONE] at the end: {events[-2:]}")
    findings.expect(events.count(b"[DONE]") == 1, "more than one [DONE]")
    told = [event for event in events if event != b"[DONE]"]
    errors = [event for event in told if "error" in event]
    reasons = Counter(
        choice["index"]
        for event in told
        for choice in event.get("choices", ())
        if choice["finish_reason"] is not None
    )
    if errors:
        findings.expect(len(errors) == 1 and told[-1] is errors[0], f"errors: {errors}")
        findings.seen[f"ended by {errors[0]['error']['code']}"] += 1
    else:
        findings.expect(reasons == dict.fromkeys(range(n), 1), f"ends of choices: {reasons}")
        findings.seen["streams read to their end"] += 1


def completion(prompt: list[int], **fields: Any) -> bytes:
    return json.dumps({"prompt": prompt, "ignore_eos": True} | fields).encode()


class Client:
    """One after the other of what clients do, well-behaved or not."""

    def __init__(self, port: int, oracle: dict[tuple[int, ...], list[int]], seed: int):
        self.port = port
        self.oracle = oracle
        self.random = random.Random(seed)

    async def act(self, findings: Findings) -> None:
        kinds = {
            self.bystander: 6,
            self.samples: 2,
            self.leaves_a_stream: 3,
            self.leaves_before_an_answer: 2,
            self.leaves_in_the_body: 1,
            self.reads_slowly: 1,
            self.bad_body: 2,
            self.oversize: 2,
            self.out_of_time: 1,
        }
        (act,) = self.random.choices(list(kinds), list(kinds.values()))
        await act(findings)
        findings.seen[act.__name__] += 1

    def prompt(self) -> list[int]:
        return [self.random.randrange(3, VOCAB_SIZE) for _ in range(self.random.randrange(1, 60))]

    async def bystander(self, findings: Findings) -> None:
        prompt = self.random.choice(list(self.oracle))
        stream = self.random.random() < 0.5
        fields = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
        async with connected(self.port) as connection:
            await connection.send(COMPLETIONS, completion(list(prompt), stream=stream, **fields))
            status = await connection.status()
            body = await connection.rest()
        if status != 200:
            findings.expect(False, f"a bystander got {status}: {body[:200]!r}")
            return
        if stream:
            events = events_of(body)
            check_ending(events, 1, findings)
            told = [e["choices"][0] for e in events if e != b"[DONE]" and "choices" in e]
            got = [token for choice in told for token in choice["token_ids"]]
        else:
            got = json.loads(body)["choices"][0]["token_ids"]
        findings.expect(got == self.oracle[prompt], f"{prompt}: {got}")

    async def samples(self, findings: Findings) -> None:
        n = self.random.randrange(1, 4)
        fields = {"max_tokens": 30, "n": n, "seed": 3, "stop": ["a", "q"], "stream": True}
        async with connected(self.port) as connection:
            await connection.send(COMPLETIONS, completion(self.prompt(), **fields))
            findings.expect(await connection.status() == 200, "samples were refused")
            check_ending(events_of(await connection.rest()), n, findings)

    async def leaves_a_stream(self, findings: Findings) -> None:
        async with connected(self.port) as connection:
            await connection.send(
                COMPLETIONS, completion(self.prompt(), max_tokens=150, stream=True, n=2)
            )
            await connection.status()
            for _ in range(self.random.randrange(5)):
                await connection.reader.readline()

    async def leaves_before_an_answer(self, findings: Findings) -> None:
        async with connected(self.port) as connection:
            await connection.send(COMPLETIONS, completion(self.prompt(), max_tokens=150))
            await asyncio.sleep(self.random.random() * 0.2)

    async def leaves_in_the_body(self, findings: Findings) -> None:
        async with connected(self.port) as connection:
            await connection.send(COMPLETIONS, b'{"prompt": [1', declared=1000)

    async def reads_slowly(self, findings: Findings) -> None:
        async with connected(self.port, limit=64) as connection:
            await connection.send(
                COMPLETIONS, completion(self.prompt(), max_tokens=100, n=4, stream=True)
            )
            for _ in range(20):
                await connection.reader.read(16)
                await asyncio.sleep(0.05)

    async def bad_body(self, findings: Findings) -> None:
        bad = self.random.choice(
            [
                b"",
                b"{",
                b"[]",
                b'{"prompt": "\\ud800"}',
                b'{"prompt": [1], "n": -1}',
                b'{"prompt": [1], "temperature": "hot"}',
                b'{"prompt": [99999999]}',
                b'{"prompt": {"a": 1}}',
                b"\xff\xfe",
                b"[" * 5000,
            ]
        )
        async with connected(self.port) as connection:
            await connection.send(COMPLETIONS, bad)
            findings.expect(await connection.status() == 400, f"{bad[:40]!r} was not refused")

    async def oversize(self, findings: Findings) -> None:
        async with connected(self.port) as connection:
            if self.random.random() < 0.5:
                await connection.send(COMPLETIONS, completion([5] * (MAX_MODEL_LEN + 1)))
                want = 400
            else:
                await connection.send(COMPLETIONS, b"{", declared=MAX_BODY + 1)
                want = 413
            status = await connection.status()
            findings.expect(status == want, f"oversize: {status} instead of {want}")

    async def out_of_time(self, findings: Findings) -> None:
        async with connected(self.port) as connection:
            body = completion(self.prompt(), max_tokens=150, timeout_s=0.05, stream=True)
            await connection.send(COMPLETIONS, body)
            status = await connection.status()
            if status == 200:
                check_ending(events_of(await connection.rest()), 1, findings)
            else:
                findings.expect(status == 408, f"out of time: {status}")


# The server


@contextlib.contextmanager
def served(model: Path, *flags: str) -> Iterator[tuple[subprocess.Popen, int]]:
    command = [sys.executable, "-m", "paged_jax.cli", "serve", str(model), "--port", "0"]
    limits = [
        *("--max-model-len", str(MAX_MODEL_LEN), "--max-body-bytes", str(MAX_BODY)),
        *("--max-num-seqs", "16", "--max-num-batched-tokens", "64", "--num-blocks", "200"),
        *("--no-access-log", "--device", "cpu", "--max-unsent-bytes", "20000"),
    ]
    with tempfile.TemporaryFile("w+") as log:
        process = subprocess.Popen([*command, *limits, *flags], cwd=ROOT, stderr=log, stdout=log)
        try:
            yield process, wait_for_port(process, log)
        finally:
            process.kill()
            process.wait()
            log.seek(0)
            text = log.read()
            if "Traceback" in text:
                print(text[-5000:])
                raise SystemExit("the server's log holds a traceback")


def wait_for_port(process: subprocess.Popen, log: Any) -> int:
    for _ in range(600):
        log.seek(0)
        found = re.search(r"Listening on http://127.0.0.1:(\d+)", log.read())
        if found:
            return int(found[1])
        assert process.poll() is None, "the server ended"
        time.sleep(0.1)
    raise SystemExit("the server does not listen")


async def get(port: int, path: str) -> tuple[int, str]:
    async with connected(port) as connection:
        head = f"GET {path} HTTP/1.1\r\nHost: t\r\nConnection: close\r\n\r\n"
        connection.writer.write(head.encode())
        return await connection.status(), (await connection.rest()).decode()


async def until(condition, what: str, within_s: float = 120.0) -> None:
    began = time.monotonic()
    while not await condition():
        if time.monotonic() - began > within_s:
            raise SystemExit(f"still not so after {within_s} s: {what}")
        await asyncio.sleep(0.1)


async def is_ready(port: int) -> bool:
    return (await get(port, "/health"))[0] == 200


async def scrape(port: int) -> dict[str, float]:
    """Every series of /metrics without those labels that are the same everywhere."""
    _, text = await get(port, "/metrics")
    found = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            rest = {k: v for k, v in sample.labels.items() if k not in ("model_name", "engine")}
            found[sample.name + "".join(f" {k}={v}" for k, v in rest.items())] = sample.value
    return found


async def is_idle(port: int) -> bool:
    now = await scrape(port)
    return not (
        now["vllm:num_requests_running"]
        or now["vllm:num_requests_waiting"]
        or now["paged_jax:kv_blocks state=used"]
    )


def resident_mb(process: subprocess.Popen) -> float:
    status = Path(f"/proc/{process.pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024


# The runs


async def crowd(
    port: int, oracle: dict, num_clients: int, seconds: float, seed: int, findings: Findings
) -> None:
    ends = time.monotonic() + seconds

    async def live(i: int) -> None:
        client = Client(port, oracle, seed * 1000 + i)
        while time.monotonic() < ends:
            await client.act(findings)

    await asyncio.gather(*(live(i) for i in range(num_clients)))


async def first_run(
    model: Path, oracle: dict, num_clients: int, seconds: float, findings: Findings
) -> None:
    """A third of the time to grow to its size, then the rest, after which all must be as before."""
    with served(model) as (process, port):
        await until(lambda: is_ready(port), "ready")
        await crowd(port, oracle, num_clients, seconds / 3, 1, findings)
        await until(lambda: is_idle(port), "idle after the first third")
        before = resident_mb(process)
        await crowd(port, oracle, num_clients, seconds * 2 / 3, 2, findings)
        await until(lambda: is_idle(port), "idle at the end")
        growth = resident_mb(process) - before
        now = await scrape(port)
        ended = {k.partition("=")[2]: v for k, v in now.items() if "request_success_total" in k}
        print(f"memory: {before:.0f} MB, grown by {growth:.1f} MB; choices by their end: {ended}")
        findings.expect(growth < MAX_GROWTH_MB, f"memory grew by {growth:.1f} MB")
        findings.expect(ended["error"] == 0, "the engine failed a request")
        findings.expect(await is_ready(port), "not healthy at the end")
        load = json.loads((await get(port, "/load"))[1])
        findings.expect(load["server_load"] == 0, f"somebody is still inside: {load}")
        await Client(port, oracle, 0).bystander(findings)


async def second_run(model: Path, oracle: dict, num_clients: int, findings: Findings) -> None:
    """SIGTERM while everybody streams: each stream ends in order, and the process with 0."""
    with served(model, "--drain-timeout-s", "3") as (process, port):
        await until(lambda: is_ready(port), "ready")
        begun = asyncio.Barrier(num_clients + 1)

        async def stream(i: int) -> None:
            body = completion([5 + i % 100, 7], max_tokens=200, stream=True)
            async with connected(port) as connection:
                await connection.send(COMPLETIONS, body)
                await begun.wait()
                status = await connection.status()
                if status == 200:
                    check_ending(events_of(await connection.rest()), 1, findings)
                else:
                    findings.expect(status == 503, f"in the drain: {status}")
                    findings.seen["turned away in the drain"] += 1

        streams = [asyncio.create_task(stream(i)) for i in range(num_clients)]
        await begun.wait()
        await asyncio.sleep(1.0)
        process.send_signal(signal.SIGTERM)
        await asyncio.gather(*streams)
        code = await asyncio.to_thread(process.wait, 30)
        findings.expect(code == 0, f"exit code {code}")


def greedy_oracle(model: Path) -> dict[tuple[int, ...], list[int]]:
    """Prompts whose greedy tokens are beyond doubt, with those tokens."""
    config = json.loads((model / "config.json").read_text())
    tensors, rng = llama_tensors(config), random.Random(5)
    found: dict[tuple[int, ...], list[int]] = {}
    while len(found) < 8:
        prompt = [rng.randrange(3, VOCAB_SIZE) for _ in range(rng.randrange(2, 40))]
        ids, lead = list(prompt), np.inf
        for _ in range(NUM_TOKENS):
            logits = llama_logits(config, tensors, ids)[-1]
            second, best = np.sort(logits)[-2:]
            lead = min(lead, best - second)
            ids.append(int(logits.argmax()))
        if lead > LEAD:
            found[tuple(prompt)] = ids[len(prompt) :]
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--clients", type=int, default=200)
    given = parser.parse_args()
    findings = Findings()
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder)
        write_tiny_llama(model, vocab_size=VOCAB_SIZE)
        write_tokenizer(model)
        oracle = greedy_oracle(model)
        asyncio.run(first_run(model, oracle, given.clients, given.seconds, findings))
        asyncio.run(second_run(model, oracle, given.clients, findings))
    for what, count in sorted(findings.seen.items()):
        print(f"{count:8d}  {what}")
    for wrong in findings.wrong[:20]:
        print(f"WRONG: {wrong}")
    print(f"{len(findings.wrong)} things were wrong")
    return 1 if findings.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
