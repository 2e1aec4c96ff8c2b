"""The real engine's numbers as Prometheus gets them, against what was done to it."""

import contextlib
import threading
from collections.abc import Callable

import pytest

from tests.live_server import LiveServer, tiny_server, wait_until
from tests.tiny_models import write_tiny_llama

COMPLETIONS = "/v1/completions"
NUM_BLOCKS = 200


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    directory = tmp_path_factory.mktemp("tiny")
    write_tiny_llama(directory)
    return directory


@pytest.fixture(scope="module")
def server(model):
    with tiny_server(model, num_blocks=NUM_BLOCKS) as server:
        yield server


def complete(server: LiveServer, **body) -> None:
    status, answer = server.post(COMPLETIONS, {"ignore_eos": True} | body)
    assert status == 200, answer


def growth_of(server: LiveServer) -> Callable[..., float]:
    """A function that says how much a counter has grown since now."""
    before = server.scrape()

    def grown(name: str, **labels: str) -> float:
        labels = {"model_name": server.engine.model_name, "engine": "0"} | labels
        key = name, frozenset(labels.items())
        return server.scrape()[key] - before[key]

    return grown


def until_idle(server: LiveServer) -> None:
    def is_idle() -> bool:
        stats = server.engine.stats()
        return not stats.num_running + stats.num_waiting + stats.blocks_in_use

    wait_until(is_idle)


def blocks(server: LiveServer) -> dict[str, float]:
    """Blocks by state, all of one scrape: between two the engine may have made a step."""
    return {
        dict(labels)["state"]: value
        for (name, labels), value in server.scrape().items()
        if name == "paged_jax:kv_blocks"
    }


def test_a91_gauges_show_the_truth_after_everybody_left(server):
    body = {"prompt": [5, 6, 7], "max_tokens": 120, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as open_sockets:
        for i in range(20):
            request = body | {"prompt": [5 + i, 6, 7]}
            open_sockets.enter_context(contextlib.closing(server.open(COMPLETIONS, request)))
        wait_until(lambda: server.metric("vllm:num_requests_running") == 8)
        wait_until(lambda: server.metric("vllm:num_requests_waiting") > 0)
        assert server.metric("vllm:kv_cache_usage_perc") > 0
        assert sum(blocks(server).values()) == NUM_BLOCKS - 1
    until_idle(server)
    assert server.metric("vllm:num_requests_running") == 0
    assert server.metric("vllm:num_requests_waiting") == 0
    assert server.metric("vllm:kv_cache_usage_perc") == 0
    assert blocks(server)["used"] == 0
    assert sum(blocks(server).values()) == NUM_BLOCKS - 1


def test_a92_tokens_looked_up_and_found_only_add_up(server):
    prompt = list(range(40, 73))  # eight full blocks and a token
    complete(server, prompt=prompt, max_tokens=1, cache_salt="a92")
    grown = growth_of(server)
    seen = []
    for _ in range(9):
        complete(server, prompt=prompt, max_tokens=1, cache_salt="a92")
        seen.append(grown("vllm:prefix_cache_hits_total"))
    assert seen == [32 * (i + 1) for i in range(9)]
    complete(server, prompt=list(range(80, 113)), max_tokens=1, cache_salt="a92")
    assert grown("vllm:prefix_cache_queries_total") == 10 * 33
    assert grown("vllm:prefix_cache_hits_total") == 9 * 32
    assert blocks(server)["cached"] >= 16


def test_a93_aborted_requests_are_counted_and_leave_no_times(server):
    grown = growth_of(server)
    body = {"prompt": [5, 6, 7], "max_tokens": 120, "ignore_eos": True, "stream": True}
    with contextlib.ExitStack() as open_sockets:

        def send(**more) -> None:
            connection = server.open(COMPLETIONS, body | more)
            open_sockets.enter_context(contextlib.closing(connection))

        for _ in range(8):
            send()
        wait_until(lambda: server.engine.stats().num_running == 8)
        send()  # this one is aborted while it waits
        wait_until(lambda: server.engine.stats().num_waiting == 1)
        wait_until(lambda: grown("vllm:generation_tokens_total") >= 3 * 8)
    until_idle(server)
    wait_until(lambda: grown("vllm:request_success_total", finished_reason="abort") == 9)
    with contextlib.closing(server.open(COMPLETIONS, body | {"n": 2})):
        wait_until(lambda: server.engine.stats().num_running == 2)
    wait_until(lambda: grown("vllm:request_success_total", finished_reason="abort") == 11)
    until_idle(server)
    for name in ("e2e_request_latency_seconds", "request_generation_tokens", "request_params_n"):
        assert grown(f"vllm:{name}_count") == 0
    assert grown("vllm:request_success_total", finished_reason="length") == 0


def test_what_the_steps_did(server):
    grown = growth_of(server)
    complete(server, prompt=list(range(100, 150)), max_tokens=5, n=3, cache_salt="steps")
    assert grown("vllm:prompt_tokens_total") == 50
    assert grown("vllm:generation_tokens_total") == 15
    assert grown("paged_jax:steps_total", kind="prefill") == 2  # 32 tokens and 18
    assert grown("paged_jax:steps_total", kind="decode") == 4  # the first tokens came before
    assert grown("paged_jax:steps_total", kind="mixed") == 0
    assert grown("paged_jax:copied_blocks_total") == 2  # the last holder writes in place
    for phase in ("host", "device"):
        assert grown("paged_jax:step_seconds_total", phase=phase) > 0
    assert grown("paged_jax:padding_tokens_total") > 0
    steps = grown("vllm:iteration_tokens_total_count")
    assert steps == sum(
        grown("paged_jax:steps_total", kind=kind) for kind in ("decode", "prefill", "mixed", "move")
    )
    assert grown("vllm:iteration_tokens_total_sum") == 50 + 4 * 3
    assert grown("vllm:iteration_tokens_total_bucket", le="8.0") == steps - 2
    assert grown("vllm:iteration_tokens_total_bucket", le="16.0") == steps - 2
    assert grown("vllm:iteration_tokens_total_bucket", le="32.0") == steps
    assert grown("vllm:iteration_tokens_total_bucket", le="+Inf") == steps


def test_what_was_swapped(model):
    with tiny_server(model, num_blocks=30, preemption_mode="swap") as server:
        bodies = [{"prompt": [5 + i, 6, 7], "max_tokens": 60} for i in range(4)]
        threads = [
            threading.Thread(target=complete, args=(server,), kwargs=body) for body in bodies
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        swaps = server.metric("paged_jax:swaps_total")
        assert swaps > 0
        assert server.metric("vllm:num_preemptions_total") >= swaps
        out = server.metric("paged_jax:swapped_blocks_total", direction="out")
        assert out >= swaps
        assert server.metric("paged_jax:swapped_blocks_total", direction="in") > 0
        host = {
            state: server.metric("paged_jax:host_kv_blocks", state=state)
            for state in ("used", "cached", "free")
        }
        assert host["used"] == 0
        assert sum(host.values()) == server.engine.stats().num_host_blocks > 0
