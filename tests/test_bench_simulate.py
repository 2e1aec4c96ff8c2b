"""The gains of continuous batching and paging, from the scheduler alone on two real traces."""

import json
from pathlib import Path

import pytest

from paged_jax import cli
from paged_jax.bench.beds import sized_for
from paged_jax.bench.compare import RUNS, compare, notes
from paged_jax.bench.simulate import SimulatedBed
from paged_jax.bench.trace import Trace, TraceRequest, read_trace
from paged_jax.config import EngineConfig

DATA = Path(__file__).parent / "data"
SLOTS, BLOCK_SIZE = 16, 16


def config(**fields) -> EngineConfig:
    chosen = {"max_num_seqs": SLOTS, "block_size": BLOCK_SIZE}
    return EngineConfig(model="simulated", **(chosen | fields))


@pytest.fixture(scope="module")
def mixed() -> dict:
    trace = read_trace(str(DATA / "mixed64.jsonl.gz"))
    return compare(SimulatedBed(), config(), trace)


@pytest.fixture(scope="module")
def prefixed() -> dict:
    trace = read_trace(str(DATA / "prefix64.jsonl.gz"))
    return compare(SimulatedBed(), config(), trace)


def test_slots_stay_full_while_somebody_waits(mixed, prefixed):
    for report, name in (
        (mixed, "continuous+paged"),
        (mixed, "continuous+paged+prefix"),
        (prefixed, "continuous+paged+prefix"),
    ):
        assert report["config"]["max_num_batched_tokens"] == 256
        assert report["runs"][name]["occupancy_while_queued"] >= 0.95
        assert report["runs"][name]["steps_while_queued"] > 100
        assert report["runs"]["static+paged"]["occupancy_while_queued"] < 0.5


def test_long_prompts_need_a_larger_token_budget_to_keep_slots_full(prefixed):
    """333 prompt tokens a request: with 256 a step the slots wait for their prompts."""
    assert 0.9 < prefixed["runs"]["continuous+paged"]["occupancy_while_queued"] < 0.95
    trace = read_trace(str(DATA / "prefix64.jsonl.gz"))
    larger = config(max_num_batched_tokens=512, enable_prefix_caching=False)
    with SimulatedBed().engine(sized_for(larger, trace)) as engine:
        figures = engine.measure(trace, label="").figures
    assert figures["occupancy_while_queued"] >= 0.95


def test_static_batches_take_twice_the_decode_steps(mixed):
    assert mixed["static_rectangle"]["batch_sizes"] == [SLOTS] * 4
    assert not mixed["notes"]
    static = mixed["runs"]["static+reserved"]["decode_steps"]
    assert static >= 2.0 * mixed["runs"]["continuous+paged"]["decode_steps"]


def test_equal_lengths_gain_nothing(mixed, prefixed):
    for report in (mixed, prefixed):
        control = report["control"]
        assert control["static_batch_sizes"] == [SLOTS] * 4
        ratio = control["static"]["decode_steps"] / control["continuous"]["decode_steps"]
        assert ratio == pytest.approx(control["ratios"]["decode_steps"])
        assert ratio <= 1.05


def test_paged_blocks_waste_less_than_one_a_sequence(mixed, prefixed):
    for report in (mixed, prefixed):
        for name in ("static+paged", "continuous+paged", "continuous+paged+prefix"):
            run = report["runs"][name]
            assert run["wasted_tokens_bound"] == SLOTS * (BLOCK_SIZE - 1)
            assert run["wasted_tokens"] <= run["wasted_tokens_max"] <= run["wasted_tokens_bound"]
            assert run["wasted_per_sequence"] == pytest.approx(BLOCK_SIZE / 2, rel=0.1)


def test_a_reservation_is_used_as_mean_length_by_longest(mixed, prefixed):
    for report in (mixed, prefixed):
        expected = report["expected"]["reserved_block_utilisation"]
        for name in ("static+reserved", "continuous+reserved"):
            used = report["runs"][name]["block_utilisation"]
            assert used == pytest.approx(expected, rel=0.05)
        assert report["runs"]["continuous+paged"]["block_utilisation"] > 0.95


def test_the_prefix_cache_saves_what_whole_blocks_share(mixed, prefixed):
    assert prefixed["prefix"]["shareable_tokens"] == 63 * 208
    assert prefixed["prefix"]["saved_tokens"] >= 0.95 * 63 * 208
    cached = prefixed["runs"]["continuous+paged+prefix"]
    assert cached["prefix_hit_tokens"] == prefixed["prefix"]["saved_tokens"]
    assert mixed["prefix"]["shareable_tokens"] == mixed["prefix"]["saved_tokens"] == 0


def test_every_run_does_all_the_work(mixed):
    assert list(mixed["runs"]) == list(RUNS)
    for run in mixed["runs"].values():
        assert (run["prompt_tokens"], run["output_tokens"]) == (8466, 4458)
        assert run["prefill_tokens"] == 8466
        assert run["preemptions"] == 0


def test_a_small_pool_is_where_paging_pays():
    trace = read_trace(str(DATA / "mixed64.jsonl.gz"))
    pool = config(num_blocks=5 * 40 + 1)
    runs = compare(SimulatedBed(), pool, trace)["runs"]
    assert runs["continuous+paged"]["steps"] < 0.5 * runs["continuous+reserved"]["steps"]


def test_a_baseline_that_is_held_back_is_told():
    trace = read_trace(str(DATA / "mixed64.jsonl.gz"))
    assert list(notes([16, 16, 16, 16], config(), trace)) == []
    (note,) = notes([16, 16, 16, 9, 7], config(), trace)
    assert note.startswith("5 static batches were formed where 4 would do")


def test_preemption_is_counted_as_work_done_twice():
    requests = tuple(TraceRequest(str(i), 0.0, None, (i, 2, 3), 60) for i in range(4))
    small = config(num_blocks=10, max_num_batched_tokens=64, enable_prefix_caching=False)
    trace = Trace("tight", requests)
    with SimulatedBed().engine(sized_for(small, trace)) as engine:
        figures = engine.measure(trace, label="").figures
    assert figures["preemptions"] > 0
    assert figures["prefill_tokens"] > figures["prompt_tokens"] == 12


def test_a_static_batch_is_seen_from_outside_whatever_its_steps():
    """Members that end at their first token, and a last batch that a timer starts."""
    lengths = [1, 5, 1, 1, 1, 1, 1, 2, 3]
    requests = tuple(TraceRequest(str(i), 0.0, None, (i, 7), m) for i, m in enumerate(lengths))
    for overlap in (False, True):
        few = config(max_num_seqs=4, batching="static", overlap=overlap)
        trace = Trace("short", requests)
        with SimulatedBed().engine(sized_for(few, trace)) as engine:
            run = engine.measure(trace, label="").run
        assert run.static_batches == ((0, 1, 2, 3), (4, 5, 6, 7), (8,))


def test_padding_is_that_of_the_step_programs():
    """Three sequences decode in a program of four rows; sampled once while prefilling."""
    requests = tuple(TraceRequest(str(i), 0.0, None, (i, 5, 6), 9) for i in range(3))
    trace = Trace("three", requests)
    with SimulatedBed().engine(sized_for(config(max_num_batched_tokens=64), trace)) as engine:
        measured = engine.measure(trace, label="")
    assert [r.num_tokens for r in measured.run.records] == [9] + [3] * 8
    # The first step is padded to 16 tokens, the others to 4 rows.
    assert measured.figures["padding_share"] == pytest.approx((7 + 8) / (16 + 8 * 4))


def test_the_command_prints_markdown_and_writes_every_figure(tmp_path, capsys):
    out = tmp_path / "out.json"
    trace = str(DATA / "prefix64.jsonl.gz")
    flags = ["--simulate", "--compare", "--json", str(out), "--num-prompts", "20"]
    assert cli.main(["bench", "offline", "--trace", trace, *flags]) == 0
    report = json.loads(out.read_text())
    assert list(report["runs"]) == list(RUNS)
    assert report["trace"]["requests"] == 20
    assert report["config"]["max_num_batched_tokens"] == 256
    assert report["simulated"] is True
    assert "seconds" not in report["runs"]["static+reserved"]
    said = capsys.readouterr().out
    assert "| continuous+paged+prefix |" in said
    assert "|:" not in said.splitlines()[0]
    assert "bound: slots x (b - 1)" in said


def test_one_run_alone(tmp_path, capsys):
    out = tmp_path / "out.json"
    trace = str(DATA / "mixed64.jsonl.gz")
    flags = ["--simulate", "--json", str(out), "--max-num-seqs", "32", "--batching", "static"]
    assert cli.main(["bench", "offline", "--trace", trace, *flags]) == 0
    report = json.loads(out.read_text())
    assert report["config"]["batching"] == "static"
    assert report["steps"] > report["decode_steps"] > 0
    assert "| slots busy" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "MODEL is missing"),
        (["--simulate", "--arrivals"], "no times"),
        (["--simulate", "--against", "true"], "no times"),
        (["m", "--compare", "--against", "true"], "give one"),
        (["m", "--compare", "--batching", "static"], "batching is what --compare compares"),
        (["m", "--repeat", "0"], "repeat must be above 0"),
        (["m", "--json", "/no/such/folder/out.json"], "cannot be written"),
        (["--simulate", "--preemption-mode", "swap"], "need a model"),
        (["--simulate", "--max-model-len", "100"], "where max_model_len is 100"),
        (["--simulate", "--compare", "--step-log", "log"], "step_log"),
    ],
)
def test_bad_input_is_refused_with_its_name(flags, said, capsys):
    trace = ["--trace", str(DATA / "mixed64.jsonl.gz")]
    assert cli.main(["bench", "offline", *trace, *flags]) == 2
    assert said in capsys.readouterr().err
