"""What Prometheus sees: the names that routers read, and numbers that agree with what was done."""

import contextlib
import threading

import pytest
from prometheus_client import REGISTRY
from prometheus_client.parser import text_string_to_metric_families

from serve import ServeOptions
from tests.fake_engine import FakeEngine
from tests.live_server import LiveServer, live_server, wait_until

COMPLETIONS = "/v1/completions"
MODEL = {"model_name": "fake/model", "engine": "0"}


def scrape(server: LiveServer) -> dict[tuple[str, frozenset], float]:
    status, headers, body = server.request("GET", "/metrics")
    assert status == 200
    assert headers["content-type"].startswith("text/plain; version=0.0.4")
    return {
        (sample.name, frozenset(sample.labels.items())): sample.value
        for family in text_string_to_metric_families(body.decode())
        for sample in family.samples
    }


def value(server: LiveServer, name: str, **labels: str) -> float:
    """Of the series with these labels and the model's."""
    return scrape(server)[name, frozenset((MODEL | labels).items())]


def complete(server: LiveServer, **body) -> int:
    return server.request("POST", COMPLETIONS, {"prompt": "hi", "max_tokens": 4} | body)[0]


def test_the_series_that_routers_read():
    with live_server(FakeEngine(delay_s=0.02)) as server:
        with contextlib.closing(
            server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 500, "stream": True})
        ):
            wait_until(lambda: server.engine.running)
            assert value(server, "vllm:num_requests_running") == 1
            assert value(server, "vllm:num_requests_waiting") == 0
            assert value(server, "vllm:kv_cache_usage_perc") == 1 / 64
        config = {"block_size": "16", "num_gpu_blocks": "65"}
        assert value(server, "vllm:cache_config_info", **config) == 1


def test_a91_gauges_show_the_truth_after_everybody_left():
    with live_server(FakeEngine(delay_s=0.02)) as server:
        body = {"prompt": "hi", "max_tokens": 500, "stream": True}
        connections = [server.open(COMPLETIONS, body) for _ in range(20)]
        wait_until(lambda: len(server.engine.running) == 20)
        assert value(server, "vllm:num_requests_running") == 20
        for connection in connections:
            connection.close()
        wait_until(lambda: not server.engine.running)
        assert value(server, "vllm:num_requests_running") == 0
        assert value(server, "vllm:kv_cache_usage_perc") == 0


def test_counters_are_the_engines_own():
    with live_server(FakeEngine()) as server:
        complete(server)
        complete(server, prompt=[1, 2], max_tokens=3)
        assert value(server, "vllm:prompt_tokens_total") == 5
        assert value(server, "vllm:generation_tokens_total") == 7
        assert value(server, "vllm:num_preemptions_total") == 3
        assert value(server, "vllm:prefix_cache_queries_total") == 40
        assert value(server, "vllm:prefix_cache_hits_total") == 16
        assert value(server, "paged_jax:steps_total", kind="decode") == 7
        assert value(server, "paged_jax:padding_tokens_total") == 7
        assert value(server, "paged_jax:compiles_total") == 5
        assert value(server, "paged_jax:compile_seconds_total") == 1.5
        assert value(server, "paged_jax:late_compiles_total") == 0


@pytest.mark.parametrize("streamed", [False, True])
def test_times_and_sizes_of_a_finished_request(streamed):
    with live_server(FakeEngine(delay_s=0.02, prefill_s=0.1)) as server:
        complete(server, stream=streamed)
        assert value(server, "vllm:time_to_first_token_seconds_count") == 1
        assert 0.1 < value(server, "vllm:time_to_first_token_seconds_sum") < 5
        assert value(server, "vllm:inter_token_latency_seconds_count") == 3
        assert 0.05 < value(server, "vllm:inter_token_latency_seconds_sum") < 5
        assert value(server, "vllm:request_time_per_output_token_seconds_count") == 1
        assert value(server, "vllm:e2e_request_latency_seconds_count") == 1
        first = value(server, "vllm:time_to_first_token_seconds_sum")
        rest = value(server, "vllm:inter_token_latency_seconds_sum")
        whole = value(server, "vllm:e2e_request_latency_seconds_sum")
        assert first + rest == pytest.approx(whole, abs=1e-3)
        assert value(server, "vllm:request_prompt_tokens_sum") == 3
        assert value(server, "vllm:request_generation_tokens_sum") == 4
        assert value(server, "vllm:request_params_max_tokens_sum") == 4
        assert value(server, "vllm:request_params_n_sum") == 1
        assert value(server, "vllm:request_success_total", finished_reason="length") == 1


def test_series_are_there_before_the_first_request():
    with live_server(FakeEngine()) as server:
        assert value(server, "vllm:time_to_first_token_seconds_count") == 0
        for reason in ("stop", "length", "abort", "error"):
            assert value(server, "vllm:request_success_total", finished_reason=reason) == 0


def test_a93_aborted_requests_are_counted_and_leave_no_times():
    with live_server(FakeEngine(delay_s=0.02, prefill_s=0.3)) as server:
        engine = server.engine
        before_first = server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 500})
        wait_until(lambda: engine.running)
        before_first.close()
        wait_until(lambda: engine.num_aborted == 1)
        assert value(server, "vllm:request_success_total", finished_reason="abort") == 1
        assert value(server, "vllm:time_to_first_token_seconds_count") == 0
        after_three = server.open(COMPLETIONS, {"prompt": "hi", "max_tokens": 500})
        wait_until(lambda: engine.num_tokens >= 3)
        after_three.close()
        wait_until(lambda: engine.num_aborted == 2)
        assert value(server, "vllm:request_success_total", finished_reason="abort") == 2
        assert value(server, "vllm:e2e_request_latency_seconds_count") == 0
        assert value(server, "vllm:request_generation_tokens_count") == 0
        assert value(server, "vllm:generation_tokens_total") == engine.num_tokens


@pytest.mark.parametrize(
    "wrong", [{"dies_after": 2}, {"fails_after": 2}, {"raises_after": (2, KeyError("x"))}]
)
def test_failed_requests_are_counted(wrong):
    with live_server(FakeEngine(**wrong)) as server:
        assert complete(server) >= 500
        server.engine.state = "ready"
        assert value(server, "vllm:request_success_total", finished_reason="error") == 1
        assert value(server, "vllm:e2e_request_latency_seconds_count") == 0


def test_refused_requests_never_count_as_finished():
    with live_server(FakeEngine()) as server:
        assert complete(server, temperature=-1) == 400
        assert complete(server, prompt=[10**6]) == 400
        reasons = ("stop", "length", "abort", "error")
        assert not any(
            value(server, "vllm:request_success_total", finished_reason=r) for r in reasons
        )


def test_unknown_fields_are_counted_without_their_names():
    with live_server(FakeEngine()) as server:
        complete(server, tempreature=1, foo=2)
        assert scrape(server)["paged_jax:unknown_fields_total", frozenset()] == 2


def test_the_prefix_is_an_option():
    with live_server(FakeEngine(), ServeOptions(metrics_prefix="paged_jax")) as server:
        complete(server)
        assert value(server, "paged_jax:num_requests_running") == 0
        assert value(server, "paged_jax:time_to_first_token_seconds_count") == 1
        assert not any(name.startswith("vllm:") for name, _ in scrape(server))


def test_two_servers_in_one_process_count_apart():
    with live_server(FakeEngine()) as one, live_server(FakeEngine()) as two:
        complete(one)
        assert value(one, "vllm:time_to_first_token_seconds_count") == 1
        assert value(two, "vllm:time_to_first_token_seconds_count") == 0
    assert not any(family.name.startswith("vllm:") for family in REGISTRY.collect())


def test_the_engine_is_not_asked_before_it_is_there():
    engine = FakeEngine(start_s=0.6)
    engine.stats = None  # calling it would be a server error
    with live_server(engine, ready=False) as server:
        found = scrape(server)
        states = {dict(labels)["state"]: v for (_, labels), v in found.items() if labels}
        assert sum(states.values()) == 1
        assert states["loading"] + states["compiling"] == 1
        assert not any(name.startswith("vllm:") for name, _ in found)
        wait_until(lambda: engine.state == "ready")
        del engine.stats
        assert scrape(server)["paged_jax:engine_state", frozenset({("state", "ready")})] == 1


def test_scraping_while_tokens_flow():
    with live_server(FakeEngine(delay_s=0.001)) as server:
        thread = threading.Thread(target=complete, args=(server,), kwargs={"max_tokens": 200})
        thread.start()
        totals = []
        while thread.is_alive():
            totals.append(value(server, "vllm:generation_tokens_total"))
        thread.join()
        assert totals == sorted(totals)
        assert value(server, "vllm:generation_tokens_total") == 200
