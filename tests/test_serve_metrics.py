"""What Prometheus sees: the names that routers read, and numbers that agree with what was done."""

import contextlib
import threading

import pytest
from prometheus_client import REGISTRY

from serve import ServeOptions
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, live_server, wait_until

COMPLETIONS = "/v1/completions"


def complete(server: LiveServer, **body) -> int:
    return server.request("POST", COMPLETIONS, {"prompt": "hi", "max_tokens": 4} | body)[0]


def test_the_series_that_routers_read():
    with live_server(FakeEngine(delay_s=0.02)) as server:
        with contextlib.closing(
            server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 500, "stream": True})
        ):
            wait_until(lambda: server.engine.running)
            assert server.metric("vllm:num_requests_running") == 1
            assert server.metric("vllm:num_requests_waiting") == 0
            assert server.metric("vllm:kv_cache_usage_perc") == 1 / 64
        config = {"block_size": "16", "num_gpu_blocks": "65"}
        assert server.metric("vllm:cache_config_info", **config) == 1


def test_a91_gauges_show_the_truth_after_everybody_left():
    with live_server(FakeEngine(delay_s=0.02)) as server:
        body = {"prompt": "hi", "max_tokens": 500, "stream": True}
        connections = [server.open(COMPLETIONS, body) for _ in range(20)]
        wait_until(lambda: len(server.engine.running) == 20)
        assert server.metric("vllm:num_requests_running") == 20
        for connection in connections:
            connection.close()
        wait_until(lambda: not server.engine.running)
        assert server.metric("vllm:num_requests_running") == 0
        assert server.metric("vllm:kv_cache_usage_perc") == 0


def test_blocks_by_state():
    with live_server(FakeEngine()) as server:
        for name, states in (
            ("paged_jax:kv_blocks", {"used": 10, "cached": 20, "free": 34}),
            ("paged_jax:host_kv_blocks", {"used": 6, "cached": 2, "free": 42}),
        ):
            assert {state: server.metric(name, state=state) for state in states} == states


def test_counters_are_the_engines_own():
    with live_server(FakeEngine()) as server:
        complete(server)
        complete(server, prompt=[1, 2], max_tokens=3)
        assert server.metric("vllm:prompt_tokens_total") == 5
        assert server.metric("vllm:generation_tokens_total") == 7
        assert server.metric("vllm:num_preemptions_total") == 3
        assert server.metric("vllm:prefix_cache_queries_total") == 40
        assert server.metric("vllm:prefix_cache_hits_total") == 16
        assert server.metric("paged_jax:steps_total", kind="decode") == 7
        assert server.metric("paged_jax:padding_tokens_total") == 7
        assert server.metric("paged_jax:swaps_total") == 8
        assert server.metric("paged_jax:swapped_blocks_total", direction="out") == 9
        assert server.metric("paged_jax:swapped_blocks_total", direction="in") == 11
        assert server.metric("paged_jax:copied_blocks_total") == 12
        assert server.metric("paged_jax:step_seconds_total", phase="host") == 0.25
        assert server.metric("paged_jax:step_seconds_total", phase="device") == 0.75
        assert server.metric("paged_jax:compile_cache_hits_total") == 4
        assert server.metric("paged_jax:compiles_total") == 5
        assert server.metric("paged_jax:compile_seconds_total") == 1.5
        assert server.metric("paged_jax:late_compiles_total") == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_times_and_sizes_of_a_finished_request(streamed):
    with live_server(FakeEngine(delay_s=0.02, prefill_s=0.1)) as server:
        complete(server, stream=streamed)
        assert server.metric("vllm:time_to_first_token_seconds_count") == 1
        assert 0.1 < server.metric("vllm:time_to_first_token_seconds_sum") < 5
        assert server.metric("vllm:inter_token_latency_seconds_count") == 3
        assert 0.05 < server.metric("vllm:inter_token_latency_seconds_sum") < 5
        assert server.metric("vllm:request_time_per_output_token_seconds_count") == 1
        assert server.metric("vllm:e2e_request_latency_seconds_count") == 1
        first = server.metric("vllm:time_to_first_token_seconds_sum")
        rest = server.metric("vllm:inter_token_latency_seconds_sum")
        whole = server.metric("vllm:e2e_request_latency_seconds_sum")
        assert first + rest == pytest.approx(whole, abs=1e-3)
        assert server.metric("vllm:request_prompt_tokens_sum") == 3
        assert server.metric("vllm:request_decode_time_seconds_sum") == pytest.approx(
            rest, abs=1e-3
        )
        prefill = server.metric("vllm:request_prefill_time_seconds_sum")
        inference = server.metric("vllm:request_inference_time_seconds_sum")
        assert 0.1 <= prefill <= first
        assert prefill + rest == pytest.approx(inference, abs=1e-3)
        assert server.metric("vllm:request_queue_time_seconds_sum") == 0
        assert server.metric("vllm:request_generation_tokens_sum") == 4
        assert server.metric("vllm:request_params_max_tokens_sum") == 4
        assert server.metric("vllm:request_params_n_sum") == 1
        assert server.metric("vllm:request_success_total", finished_reason="length") == 1


def test_series_are_there_before_the_first_request():
    with live_server(FakeEngine()) as server:
        assert server.metric("vllm:time_to_first_token_seconds_count") == 0
        for reason in ("stop", "length", "abort", "error"):
            assert server.metric("vllm:request_success_total", finished_reason=reason) == 0


def test_a93_aborted_requests_are_counted_and_leave_no_times():
    with live_server(FakeEngine(delay_s=0.02, prefill_s=0.3)) as server:
        engine = server.engine
        before_first = server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 500})
        wait_until(lambda: engine.running)
        before_first.close()
        wait_until(lambda: engine.num_aborted == 1)
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 1
        assert server.metric("vllm:time_to_first_token_seconds_count") == 0
        after_three = server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 500})
        wait_until(lambda: engine.num_tokens >= 3)
        after_three.close()
        wait_until(lambda: engine.num_aborted == 2)
        assert server.metric("vllm:request_success_total", finished_reason="abort") == 2
        assert server.metric("vllm:e2e_request_latency_seconds_count") == 0
        assert server.metric("vllm:request_generation_tokens_count") == 0
        assert server.metric("vllm:generation_tokens_total") == engine.num_tokens


@pytest.mark.parametrize(
    "wrong", [{"dies_after": 2}, {"fails_after": 2}, {"raises_after": (2, KeyError("x"))}]
)
def test_failed_requests_are_counted(wrong):
    with live_server(FakeEngine(**wrong)) as server:
        assert complete(server) >= 500
        server.engine.state = "ready"
        assert server.metric("vllm:request_success_total", finished_reason="error") == 1
        assert server.metric("vllm:e2e_request_latency_seconds_count") == 0


def test_refused_requests_never_count_as_finished():
    with live_server(FakeEngine()) as server:
        assert complete(server, temperature=-1) == 400
        assert complete(server, prompt=[10**6]) == 400
        reasons = ("stop", "length", "abort", "error")
        assert not any(
            server.metric("vllm:request_success_total", finished_reason=r) for r in reasons
        )


def test_unknown_fields_are_counted_without_their_names():
    with live_server(FakeEngine()) as server:
        complete(server, tempreature=1, foo=2)
        assert server.scrape()["paged_jax:unknown_fields_total", frozenset()] == 2


def test_the_prefix_is_an_option():
    with live_server(FakeEngine(), ServeOptions(metrics_prefix="paged_jax")) as server:
        complete(server)
        assert server.metric("paged_jax:num_requests_running") == 0
        assert server.metric("paged_jax:time_to_first_token_seconds_count") == 1
        assert not any(name.startswith("vllm:") for name, _ in server.scrape())


def test_two_servers_in_one_process_count_apart():
    with live_server(FakeEngine()) as one, live_server(FakeEngine()) as two:
        complete(one)
        assert one.metric("vllm:time_to_first_token_seconds_count") == 1
        assert two.metric("vllm:time_to_first_token_seconds_count") == 0
    assert not any(family.name.startswith("vllm:") for family in REGISTRY.collect())


def test_the_engine_is_not_asked_before_it_is_there():
    engine = FakeEngine(start_s=0.6)
    engine.stats = None  # calling it would be a server error
    with live_server(engine, ready=False) as server:
        found = server.scrape()
        states = {dict(labels)["state"]: v for (_, labels), v in found.items() if labels}
        assert sum(states.values()) == 1
        assert states["loading"] + states["compiling"] == 1
        assert not any(name.startswith("vllm:") for name, _ in found)
        wait_until(lambda: engine.state == "ready")
        del engine.stats
        assert server.scrape()["paged_jax:engine_state", frozenset({("state", "ready")})] == 1


def test_scraping_while_tokens_flow():
    with live_server(FakeEngine(delay_s=0.001)) as server:
        thread = threading.Thread(target=complete, args=(server,), kwargs={"max_tokens": 200})
        thread.start()
        totals = []
        while thread.is_alive():
            totals.append(server.metric("vllm:generation_tokens_total"))
        thread.join()
        assert totals == sorted(totals)
        assert server.metric("vllm:generation_tokens_total") == 200


def test_time_in_the_queue_is_no_time_of_work():
    with live_server(FakeEngine(delay_s=0.02, prefill_s=0.2, queue_s=0.15)) as server:
        complete(server)
        assert server.metric("vllm:request_queue_time_seconds_sum") == pytest.approx(0.15)
        prefill = server.metric("vllm:request_prefill_time_seconds_sum")
        first = server.metric("vllm:time_to_first_token_seconds_sum")
        assert 0.05 <= prefill <= first - 0.15
        decode = server.metric("vllm:request_decode_time_seconds_sum")
        inference = server.metric("vllm:request_inference_time_seconds_sum")
        assert inference == pytest.approx(prefill + decode, abs=1e-3)


def test_memory_weights_and_responses():
    with live_server(FakeEngine()) as server:
        assert server.metric("paged_jax:hbm_bytes", kind="weights") == 1000
        assert server.metric("paged_jax:hbm_bytes", kind="kv_cache") == 3000
        assert server.metric("paged_jax:params_version") == 2
        complete(server)
        complete(server, n=-1)
        found = server.scrape()
        for status, at_least in (("200", 1), ("400", 1)):
            assert found["paged_jax:responses_total", frozenset({("status", status)})] >= at_least
