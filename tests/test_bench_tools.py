"""What the benchmarks share: traces, times, tables, reports, peers."""

import gzip
import io
import json
import math
import sys
import time

import pytest

from paged_jax.bench import report as report_module
from paged_jax.bench.against import ratios_to_peer, run_peer
from paged_jax.bench.report import environment, require_writable, write_json
from paged_jax.bench.table import Table, markdown, number, show
from paged_jax.bench.timing import alternate, percentiles, ratio_of_pairs, repeat_timed, spread
from paged_jax.bench.trace import Trace, TraceRequest, equal_lengths, read_trace, with_token_ids
from paged_jax.errors import ConfigError, PagedJaxError, RequestError


def trace_of(*sizes: tuple[int, int]) -> Trace:
    requests = (
        TraceRequest(str(i), 0.0, None, tuple(range(100 * i, 100 * i + p)), m)
        for i, (p, m) in enumerate(sizes)
    )
    return Trace("test", tuple(requests))


# -- traces -------------------------------------------------------------------------------------


def test_a_trace_is_read_in_the_order_of_its_arrivals(tmp_path):
    lines = [
        '{"id": "late", "arrival_s": 2, "prompt": "b", "max_tokens": 3}',
        "",
        '{"prompt_token_ids": [4, 5], "max_tokens": 1, "something": "else"}',
    ]
    expected = (
        TraceRequest("2", 0.0, None, (4, 5), 1),
        TraceRequest("late", 2.0, "b", (), 3),
    )
    plain, zipped = tmp_path / "one.jsonl", tmp_path / "one.jsonl.gz"
    plain.write_text("\n".join(lines))
    zipped.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_trace(str(plain)) == read_trace(str(zipped)) == Trace("one", expected)
    assert read_trace(str(plain), num_requests=1).requests == expected[1:]


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ("{", "line 2: not JSON"),
        ("[]", "line 2: expected an object"),
        ('{"max_tokens": 1}', "needs prompt_token_ids or prompt"),
        ('{"prompt": "", "max_tokens": 1}', "prompt must be a text"),
        ('{"prompt_token_ids": [], "max_tokens": 1}', "prompt_token_ids must be a list"),
        ('{"prompt_token_ids": [1, -1], "max_tokens": 1}', "prompt_token_ids must be a list"),
        ('{"prompt_token_ids": [true], "max_tokens": 1}', "prompt_token_ids must be a list"),
        ('{"prompt": "a"}', "max_tokens must be at least 1, got None"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens must be at least 1, got 0"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": -1}', "arrival_s"),
        ('{"prompt": "a", "max_tokens": 1, "arrival_s": Infinity}', "arrival_s"),
    ],
)
def test_a_bad_line_is_named(line, said, tmp_path):
    file = tmp_path / "bad.jsonl"
    file.write_text('{"prompt": "a", "max_tokens": 1}\n' + line)
    with pytest.raises(RequestError, match=r"bad\.jsonl, line 2") as error:
        read_trace(str(file))
    assert said in str(error.value)


@pytest.mark.parametrize(
    ("name", "data"), [("no", None), ("empty", b"\n"), ("x.gz", b"?"), ("b", b"\xff")]
)
def test_a_bad_file_is_named(name, data, tmp_path):
    file = tmp_path / name
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(RequestError, match=name):
        read_trace(str(file))


def test_texts_are_encoded_where_ids_are_missing():
    requests = (TraceRequest("a", 0.0, "xy", (), 1), TraceRequest("b", 0.0, "xy", (9,), 1))
    encoded = with_token_ids(Trace("t", requests), lambda text: [ord(c) for c in text])
    assert [r.prompt_token_ids for r in encoded.requests] == [(120, 121), (9,)]


def test_the_mean_length_is_over_the_steps_that_a_sequence_runs():
    """Lengths 2, 3, 4 in three steps, and 10 in one."""
    assert trace_of((2, 3), (10, 1)).mean_held_len == pytest.approx((2 + 3 + 4 + 10) / 4)


def test_shareable_tokens_are_whole_blocks_of_earlier_prompts():
    def shareable(*prompts: list[int]) -> int:
        requests = (TraceRequest("", 0.0, None, tuple(ids), 1) for ids in prompts)
        return Trace("t", tuple(requests)).num_shareable_tokens(4)

    assert shareable([1] * 12) == 0
    assert shareable([1] * 12, [1] * 12) == 8, "the last token is computed, so its block is too"
    assert shareable([1] * 12, [1] * 13, [1] * 13) == 12 + 12
    assert shareable([1] * 11, [1] * 4 + [2] * 8) == 4
    assert shareable([1] * 3, [1] * 9) == 0
    assert shareable([2] + [1] * 8, [3] + [1] * 8) == 0, "a digest names the whole prefix"


def test_the_control_has_whole_batches_of_the_mean_length():
    control = equal_lengths(trace_of((2, 3), (10, 1), (3, 2), (7, 9), (1, 1)), 2)
    assert {(r.num_prompt_tokens, r.max_tokens) for r in control.requests} == {(5, 3)}
    assert len(control.requests) == 4
    assert len({r.prompt_token_ids for r in control.requests}) == 4
    assert len(equal_lengths(trace_of((2, 3)), 16).requests) == 16


# -- times --------------------------------------------------------------------------------------


def test_spread_and_percentiles():
    assert spread([3.0, 1.0, 2.0]) == (2.0, 1.0, 3.0, 3)
    assert percentiles([]) == {}
    values = percentiles(list(range(101)))
    assert values == {"mean": 50, "p50": 50, "p90": 90, "p99": 99, "max": 100}
    assert ratio_of_pairs([2.0, 6.0, 9.0], [1.0, 2.0, 3.0]) == (3.0, 2.0, 3.0, 3)


def test_repeated_calls_are_timed_after_the_warm_up():
    calls = []

    def call() -> None:
        calls.append(len(calls))
        time.sleep(0.2 if len(calls) <= 2 else 0.0)

    seconds = repeat_timed(call, 3, warm_up=2)
    assert len(calls) == 5
    assert max(seconds) < 0.2


def test_runs_take_turns():
    order = []

    def runs(name):
        return lambda: order.append(name) or len(order)

    assert alternate({"a": runs("a"), "b": runs("b")}, 2) == {"a": [1, 3], "b": [2, 4]}
    assert order == ["a", "b", "a", "b"]


# -- tables and reports -------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (None, "-"),
        (0.0, "0"),
        (7, "7"),
        (8466, "8,466"),
        (950.4, "950"),
        (12.345, "12.3"),
        (0.4567, "0.457"),
        (0.0000123, "0.000012"),
    ],
)
def test_numbers(value, shown):
    assert number(value) == shown


TABLE = Table("Title", ("name", "n"), (("a", "1"), ("longer", "1,000")))


def test_markdown_is_aligned():
    assert markdown(TABLE) == (
        "| name   |     n |\n|--------|------:|\n| a      |     1 |\n| longer | 1,000 |"
    )


def test_a_pipe_gets_markdown_and_a_terminal_a_drawing_too():
    class Terminal(io.StringIO):
        def isatty(self) -> bool:
            return True

    pipe, terminal = io.StringIO(), Terminal()
    show(TABLE, pipe)
    show(TABLE, terminal)
    assert pipe.getvalue() == f"\nTitle\n\n{markdown(TABLE)}\n"
    assert markdown(TABLE) in terminal.getvalue()
    assert "┃" in terminal.getvalue()


def test_reports_are_rounded_and_hold_nothing_that_is_not_json(tmp_path, capsys):
    out = tmp_path / "out.json"
    write_json(str(out), {"a": 1 / 3, "b": [math.inf, 10], "c": {"d": (1e-9 / 3, None)}})
    assert json.loads(out.read_text()) == {
        "a": 0.333333,
        "b": ["inf", 10],
        "c": {"d": [3.33333e-10, None]},
    }
    assert f"written to {out}" in capsys.readouterr().err
    write_json(None, {})


def test_a_report_that_cannot_be_written_is_found_first(tmp_path):
    require_writable(None)
    require_writable(str(tmp_path / "new.json"))
    assert not (tmp_path / "new.json").exists()
    for bad in (tmp_path, tmp_path / "no" / "folder.json"):
        with pytest.raises(RequestError, match="cannot be written"):
            require_writable(str(bad))
        with pytest.raises(RequestError, match="cannot be written"):
            write_json(str(bad), {})


def test_the_environment_names_what_is_installed(monkeypatch):
    here = environment()
    assert {"jax", "numpy", "python", "num_cpus", "load", "date"} <= here.keys()
    monkeypatch.setattr(report_module, "PACKAGES", ("no-such-package",))
    assert "jax" not in environment()


# -- peers --------------------------------------------------------------------------------------


def peer(code: str) -> str:
    return f"{sys.executable} -c '{code}'"


def test_a_peer_is_believed_by_its_last_line():
    said = run_peer(
        peer('print("loading"); print("{\\"total_tok_s\\": 5, \\"system\\": \\"x\\"}\\n")')
    )
    assert said == {"total_tok_s": 5, "system": "x"}


@pytest.mark.parametrize(
    ("command", "said"),
    [
        ("no-such-program --flag", "no-such-program cannot be run: No such file"),
        (peer("print(5)"), "no JSON line with total_tok_s:\n5"),
        (peer("print({})"), "no JSON line"),
        (peer("import sys; print(1); sys.exit('out of memory')"), "code 1"),
        (peer("pass"), "code 0"),
    ],
)
def test_a_peer_that_fails_is_quoted(command, said):
    with pytest.raises(PagedJaxError) as error:
        run_peer(command.replace("'out of memory'", '"out of memory"'))
    assert said in str(error.value)


@pytest.mark.parametrize("command", ["", "sh -c 'open"])
def test_a_command_that_is_none(command):
    with pytest.raises(ConfigError, match="against"):
        run_peer(command)


def test_ratios_to_a_peer_are_round_by_round():
    ours = [{"total_tok_s": 10.0, "output_tok_s": 1.0}, {"total_tok_s": 30.0, "output_tok_s": 1.0}]
    theirs = [{"system": "x", "total_tok_s": 5.0}, {"system": "x", "total_tok_s": 10.0}]
    report = ratios_to_peer(ours, theirs)
    assert report["system"] == "x"
    assert report["total_tok_s_ratio"] == {"median": 2.5, "low": 2.0, "high": 3.0, "num": 2}
    assert "output_tok_s" not in report
