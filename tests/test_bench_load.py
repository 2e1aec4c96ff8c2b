"""`paged-jax bench serve`: the load, the client under it, and the figures."""

import asyncio
import contextlib
import json
import socket
import threading
from collections.abc import Iterator

import pytest

from paged_jax import cli
from paged_jax.bench.against import peer_on_trace
from paged_jax.bench.http_stream import Endpoint, HTTPError, get_json, post_events
from paged_jax.bench.load import Client, Reply, arrival_times, random_trace, run_load
from paged_jax.bench.load_figures import load_figures, parse_slo
from paged_jax.bench.trace import Trace, TraceRequest
from paged_jax.errors import ConfigError, PagedJaxError
from tests.fake_engine import FakeEngine
from tests.live_server import live_server

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"


def trace_of(*arrivals: float, max_tokens: int = 4) -> Trace:
    requests = (
        TraceRequest(str(i), at, f"prompt {i}", (5, 6, 7 + i), max_tokens)
        for i, at in enumerate(arrivals)
    )
    return Trace("test", tuple(requests))


@contextlib.contextmanager
def canned_server(*answers: bytes, heard: list[bytes] | None = None) -> Iterator[str]:
    """A server that gives each connection the next of these bytes, and closes it."""
    heard = [] if heard is None else heard
    listener = socket.create_server(("127.0.0.1", 0))

    def answer() -> None:
        for data in answers:
            connection, _ = listener.accept()
            with connection:
                heard.append(connection.recv(65536))
                connection.sendall(data)

    thread = threading.Thread(target=answer)
    thread.start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        thread.join(10)
        listener.close()
        assert not thread.is_alive()


def load(url: str, trace: Trace, arrivals=None, **fields) -> tuple[list[Reply], float]:
    limit = fields.pop("max_concurrency", None)
    client = Client(Endpoint.parse(url), "fake/model", **fields)
    arrivals = [0.0] * len(trace.requests) if arrivals is None else arrivals
    return asyncio.run(run_load(client, trace.requests, arrivals, max_concurrency=limit))


# -- the load -----------------------------------------------------------------------------------


def test_every_request_is_sent_as_it_is_and_its_tokens_are_timed():
    engine = FakeEngine(delay_s=0.01, prefill_s=0.3)
    with live_server(engine) as server:
        replies, seconds = load(server.url, trace_of(0, 0, 0))
    assert sorted(prompt for _, prompt, _ in engine.seen) == [(5, 6, 7), (5, 6, 8), (5, 6, 9)]
    for _, _, params in engine.seen:
        assert (params.max_tokens, params.temperature, params.ignore_eos) == (4, 0, True)
    for reply in replies:
        assert reply.error is None
        assert (reply.num_prompt_tokens, reply.num_output_tokens) == (3, 4)
        assert reply.ttft_s >= 0.31
        assert len(reply.itl_s) == 3
        assert reply.e2el_s >= reply.ttft_s + sum(reply.itl_s) >= 0.34
        assert reply.tpot_s == pytest.approx((reply.e2el_s - reply.ttft_s) / 3)
        assert reply.wait_s < 0.3
    assert 0.34 <= seconds < 1.0, "the three ran at the same time"


def test_text_can_be_sent_instead_of_token_ids():
    engine = FakeEngine()
    with live_server(engine) as server:
        load(server.url, trace_of(0), send_text=True, ignore_eos=False)
    _, prompt, params = engine.seen[0]
    assert bytes(prompt[1:]) == b"prompt 0"
    assert not params.ignore_eos


def test_a_slow_server_does_not_slow_the_arrivals():
    """Open loop: the last one is sent while the first is still answered."""
    engine = FakeEngine(delay_s=0.1)
    with live_server(engine) as server:
        _, seconds = load(server.url, trace_of(0, 0, 0), [0.0, 0.1, 0.2])
    assert 0.6 <= seconds < 1.1


def test_with_a_limit_requests_wait_outside():
    engine = FakeEngine(delay_s=0.1)
    with live_server(engine) as server:
        replies, seconds = load(server.url, trace_of(0, 0), max_concurrency=1)
    assert seconds >= 0.8
    waits = sorted(reply.wait_s for reply in replies)
    assert waits[0] < 0.3
    assert waits[1] >= 0.4, "waiting is told apart"
    assert all(reply.e2el_s < 0.75 for reply in replies), "and is no part of the request's time"


def test_a_failure_is_counted_and_stops_no_other():
    engine = FakeEngine(max_model_len=6)
    trace = trace_of(0, 0, 0)
    long = TraceRequest("long", 0.0, None, (5, 6, 7), 100)
    with live_server(engine) as server:
        replies, seconds = load(server.url, Trace("mixed", (*trace.requests[:2], long)))
    figures = load_figures(replies, seconds, {})
    assert figures["failed"] == 3, "3 + 4 tokens are too many as well"
    assert "maximum context length is 6" in next(iter(figures["errors"]))
    assert figures["mean_ttft_ms"] is None
    engine = FakeEngine(max_model_len=7)
    with live_server(engine) as server:
        replies, seconds = load(server.url, Trace("mixed", (*trace.requests[:2], long)))
    figures = load_figures(replies, seconds, {})
    assert (figures["completed"], figures["failed"]) == (2, 1)


def test_a_request_that_takes_too_long_has_failed():
    engine = FakeEngine(delay_s=1.0)
    with live_server(engine) as server:
        (reply,), _ = load(server.url, trace_of(0), timeout_s=0.2)
    assert reply.error == "no end within 0.2 s"
    assert engine.num_aborted == 1


def test_a_stream_that_dies_has_failed():
    engine = FakeEngine(fails_after=2)
    with live_server(engine) as server:
        (reply,), _ = load(server.url, trace_of(0))
    assert reply.error is not None
    assert "error" in reply.error


# -- arrivals -----------------------------------------------------------------------------------


def test_arrivals_keep_the_traces_pattern():
    trace = trace_of(1.0, 2.0, 5.0)
    assert arrival_times(trace, None, 0) == [1.0, 2.0, 5.0]
    assert arrival_times(trace, float("inf"), 0) == [0.0, 0.0, 0.0]
    stretched = arrival_times(trace, 0.1, 0)
    assert stretched == pytest.approx([0.0, 5.0, 20.0]), "two gaps in twenty seconds"


def test_a_trace_without_arrivals_gets_a_poisson_process():
    trace = trace_of(*[0.0] * 4000)
    assert arrival_times(trace, None, 0) == [0.0] * 4000
    times = arrival_times(trace, 8.0, seed=1)
    assert times[0] == 0.0
    assert times == sorted(times)
    assert times[-1] == pytest.approx(4000 / 8.0, rel=0.1)
    assert times == arrival_times(trace, 8.0, seed=1) != arrival_times(trace, 8.0, seed=2)


def test_random_prompts_have_the_sizes_asked_for():
    trace = random_trace(5, input_len=30, output_len=7, vocab_size=100, seed=0)
    assert [len(r.prompt_token_ids) for r in trace.requests] == [30] * 5
    assert {r.max_tokens for r in trace.requests} == {7}
    ids = {token for r in trace.requests for token in r.prompt_token_ids}
    assert min(ids) >= 16
    assert max(ids) < 100
    assert len({r.prompt_token_ids for r in trace.requests}) == 5


# -- figures ------------------------------------------------------------------------------------


def reply(ttft_s: float, gaps_s: list[float]) -> Reply:
    e2el_s = ttft_s + sum(gaps_s)
    return Reply(10, len(gaps_s) + 1, 0.0, ttft_s, gaps_s, e2el_s)


def test_figures_by_hand():
    replies = [reply(0.1, [0.02, 0.04]), reply(0.3, []), Reply(10, error="broken")]
    figures = load_figures(replies, 2.0, {"ttft_ms": 200.0})
    assert (figures["num_prompts"], figures["completed"], figures["failed"]) == (3, 2, 1)
    assert (figures["total_input_tokens"], figures["total_output_tokens"]) == (20, 4)
    assert figures["request_throughput"] == 1.0
    assert figures["output_throughput"] == 2.0
    assert figures["total_token_throughput"] == 12.0
    assert figures["request_goodput"] == 0.5
    assert figures["mean_ttft_ms"] == pytest.approx(200.0)
    assert figures["median_tpot_ms"] == pytest.approx(30.0), "one token has no gap"
    assert figures["mean_itl_ms"] == pytest.approx(30.0)
    assert figures["p99_e2el_ms"] == pytest.approx(300 - 0.01 * 140)
    assert figures["errors"] == {"broken": 1}
    assert load_figures(replies, 2.0, {})["request_goodput"] is None


def test_every_limit_must_be_kept():
    replies = [reply(0.1, [0.02]), reply(0.1, [0.2]), reply(0.9, [0.02])]
    slo = parse_slo(["ttft_ms:500", "tpot_ms:100"])
    assert load_figures(replies, 1.0, slo)["request_goodput"] == 1.0


@pytest.mark.parametrize("limit", ["ttft_ms", "ttft_ms:fast", "ttft:5", "tpot_ms:0", "e2el_ms:nan"])
def test_a_bad_limit_is_named(limit):
    with pytest.raises(ConfigError, match=limit):
        parse_slo([limit])


# -- the client ---------------------------------------------------------------------------------


async def all_events(url: str) -> list:
    events = post_events(Endpoint.parse(url), "/v1/completions", {}, {"prompt": "x"})
    return [event.data async for event in events]


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b'\r\ndata: {"a": 1}\r\n\r\n: a comment\n\ndata:{"a": 2}\n\ndata: [DONE]\n\n',
        HEAD + b'Content-Length: 32\r\n\r\ndata: {"a": 1}\n\ndata: {"a": 2}\n\n',
        HEAD
        + b"Transfer-Encoding: chunked\r\n\r\n"
        + chunk(b'data: {"a"')
        + chunk(b': 1}\n\ndata: {"a": 2}\n')
        + chunk(b"\ndata: [DONE]\n\n")
        + b"0\r\n\r\n",
    ],
    ids=["until closed", "with a length", "chunked anywhere"],
)
def test_events_come_out_however_they_are_sent(answer):
    with canned_server(answer) as url:
        assert asyncio.run(all_events(url)) == [{"a": 1}, {"a": 2}]


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (b"HTTP/1.1 503 Busy\r\nContent-Length: 4\r\n\r\nfull", "answered 503: full"),
        (b"SSH-2.0\r\n\r\n", "did not speak HTTP"),
        (b"HTTP/1.1 200 OK\r\n", "broke off"),
        (HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + b"ff\r\ndata: ", "broke off"),
        (HEAD + b"Content-Length: 99\r\n\r\ndata: ", "broke off"),
        (HEAD + b"\r\ndata: {broken\n\n", "answered 200: {broken"),
        (HEAD + b'\r\ndata: {"error": {"message": "too long"}}\n\n', "too long"),
    ],
)
def test_what_a_server_does_wrong_is_told(answer, said):
    with canned_server(answer) as url, pytest.raises(HTTPError, match=said):
        asyncio.run(all_events(url))


def test_nobody_there_is_told():
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    with pytest.raises(HTTPError, match=f"127.0.0.1:{port}: "):
        asyncio.run(get_json(Endpoint("127.0.0.1", port, False, ""), "/v1/models", {}))


def test_addresses():
    assert Endpoint.parse("http://h:81") == ("h", 81, False, "")
    assert Endpoint.parse("https://h/") == ("h", 443, True, "")
    assert Endpoint.parse("http://h/some/v1/") == ("h", 80, False, "/some")
    for bad in ("h:81", "ftp://h", "http://", "http://h:port"):
        with pytest.raises(ConfigError, match="base_url"):
            Endpoint.parse(bad)


# -- the command --------------------------------------------------------------------------------


def test_the_command_with_a_trace_and_a_peer(tmp_path, capsys):
    file, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    lines = ({"prompt_token_ids": [9, 8], "max_tokens": 3, "arrival_s": 0.01 * i} for i in range(4))
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    ours, peer = FakeEngine(), FakeEngine(delay_s=0.05, model_name="peer/model")
    with live_server(ours) as server, live_server(peer) as other:
        argv = ["--base-url", f"{server.url}/v1", "--trace", str(file), "--json", str(out)]
        flags = ["--slo", "ttft_ms:5000", "tpot_ms:5000", "--against", other.url, "--repeat", "2"]
        assert cli.main(["bench", "serve", *argv, *flags]) == 0
    assert len(ours.seen) == len(peer.seen) == 8
    report = json.loads(out.read_text())
    assert report["model_id"] == "fake/model"
    assert (report["completed"], report["total_output_tokens"]) == (4, 12)
    assert report["request_goodput"] == report["request_throughput"] > 0
    ratios = report["against"][other.url]["ratios"]
    assert ratios["median_tpot_ms"]["num"] == 2
    assert ratios["median_tpot_ms"]["low"] > 1.0
    assert ratios["output_throughput"]["median"] > 1.0
    said = capsys.readouterr().out
    assert "requests completed / failed" in said
    assert "goodput under ttft_ms:5000 tpot_ms:5000" in said


def test_the_command_with_random_prompts(tmp_path):
    engine, out = FakeEngine(), tmp_path / "out.json"
    with live_server(engine) as server:
        sizes = ["--num-prompts", "3", "--input-len", "5", "--output-len", "2"]
        flags = [*sizes, "--vocab-size", "64", "--request-rate", "inf", "--json", str(out)]
        assert cli.main(["bench", "serve", "--base-url", server.url, *flags]) == 0
    assert [len(prompt) for _, prompt, _ in engine.seen] == [5, 5, 5]
    assert json.loads(out.read_text())["request_rate"] == "inf"


def test_a_key_goes_with_every_request(capsys):
    models = b'HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n{"data": [{"id": "theirs"}]}'
    answer = HEAD + b'\r\ndata: {"choices": [{"text": "a"}]}\n\ndata: [DONE]\n\n'
    heard: list[bytes] = []
    with canned_server(models, answer, heard=heard) as url:
        flags = ["--num-prompts", "1", "--api-key", "secret"]
        assert cli.main(["bench", "serve", "--base-url", f"{url}/up/v1", *flags]) == 0
    assert heard[0].startswith(b"GET /up/v1/models HTTP/1.1\r\n")
    assert heard[1].startswith(b"POST /up/v1/completions HTTP/1.1\r\n")
    assert all(b"\r\nAuthorization: Bearer secret\r\n" in request for request in heard)
    assert b'"model": "theirs"' in heard[1]
    assert "theirs at" in capsys.readouterr().out


def test_a_failed_request_fails_the_command(capsys):
    engine = FakeEngine(max_model_len=5)
    with live_server(engine) as server:
        argv = ["--base-url", server.url, "--num-prompts", "2", "--vocab-size", "64"]
        assert cli.main(["bench", "serve", *argv]) == 1
    assert "2 requests failed: the server answered 400" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "give --trace FILE, or --num-prompts"),
        (["--num-prompts", "0"], "num_prompts must be above 0"),
        (["--num-prompts", "1", "--request-rate", "-1"], "request_rate must be above 0"),
        (["--num-prompts", "1", "--slo", "ttft:5"], "slo 'ttft:5'"),
        (["--trace", "missing.jsonl"], "missing.jsonl cannot be read"),
    ],
)
def test_bad_flags_are_refused_by_name(flags, said, capsys):
    assert cli.main(["bench", "serve", "--base-url", "http://127.0.0.1:1", *flags]) == 2
    assert said in capsys.readouterr().err


# -- peers --------------------------------------------------------------------------------------


def test_a_peer_of_the_server_may_be_a_command(tmp_path, capsys):
    out = tmp_path / "out.json"
    command = """sh -c 'echo "{\\"total_tok_s\\": 0.5, \\"system\\": \\"slow\\"}"'"""
    with live_server(FakeEngine()) as server:
        flags = ["--num-prompts", "2", "--vocab-size", "64", "--json", str(out), "--repeat", "2"]
        argv = ["bench", "serve", "--base-url", server.url, *flags, "--against", command]
        assert cli.main(argv) == 0
    peer = json.loads(out.read_text())["against"][command]
    assert peer["figures"]["system"] == "slow"
    assert list(peer["ratios"]) == ["total_token_throughput"]
    assert peer["ratios"]["total_token_throughput"]["low"] > 1.0
    assert "total_token_throughput, better than" in capsys.readouterr().out


def test_a_server_may_be_a_peer_of_the_engine():
    engine = FakeEngine(delay_s=0.02)
    with live_server(engine) as server:
        said = peer_on_trace(server.url, trace_of(0, 0, 1.0), arrivals=False)()
        assert said["seconds"] < 0.9
        assert said["system"] == f"fake/model at {server.url}"
        assert said["total_tok_s"] == pytest.approx((9 + 12) / said["seconds"])
        assert said["output_tok_s"] == pytest.approx(12 / said["seconds"])
        said = peer_on_trace(server.url, trace_of(0, 0, 1.0), arrivals=True)()
        assert said["seconds"] >= 1.08


def test_a_peer_that_fails_a_request_is_no_peer():
    with live_server(FakeEngine(max_model_len=5)) as server:
        run = peer_on_trace(server.url, trace_of(0), arrivals=False)
        with pytest.raises(PagedJaxError, match="failed requests of the trace"):
            run()


@pytest.mark.parametrize("target", ["http://", "sh -c 'open", " "])
def test_a_peer_that_cannot_be_is_refused_first(target, capsys):
    argv = ["bench", "serve", "--base-url", "http://127.0.0.1:1", "--num-prompts", "1"]
    assert cli.main([*argv, "--against", target]) == 2
    assert "paged-jax: " in capsys.readouterr().err
