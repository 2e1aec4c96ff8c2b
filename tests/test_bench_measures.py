"""`paged-jax bench latency | startup | quant | host | calibrate`, on a tiny random model."""

import json

import jax
import jax.numpy as jnp
import pytest

from paged_jax import cli
from paged_jax.attention import discover_layers
from paged_jax.bench import host, quant
from paged_jax.bench.calibrate import calibrate
from paged_jax.bench.contiguous import decode_step, empty_cache
from paged_jax.bench.drive import greedy
from paged_jax.bench.model_bed import ModelSize
from paged_jax.bench.startup import PHASES, start_once
from paged_jax.bench.step_times import decode_batch, step_times
from paged_jax.config import EngineConfig
from paged_jax.engine import Engine
from paged_jax.errors import ConfigError, PagedJaxError
from paged_jax.models import ServedModel, load_model
from paged_jax.progress import SilentProgress
from tests.tiny_models import write_tiny_llama
from tests.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

SMALL = {"max_num_seqs": 4, "max_num_batched_tokens": 32, "max_model_len": 64, "num_blocks": 40}
VOCAB, HIDDEN = 160, 64
FLAGS = ["--max-num-batched-tokens", "32", "--no-calibrate"]


@pytest.fixture(scope="module")
def directory(tmp_path_factory):
    path = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_llama(path, num_hidden_layers=1, vocab_size=VOCAB, hidden_size=HIDDEN)
    return path


@pytest.fixture(scope="module")
def model(directory) -> ServedModel:
    return load_model(directory, dtype="float32")


@pytest.fixture(scope="module")
def engine(model):
    config = EngineConfig(model="tiny", block_size=4, warmup="none", **SMALL)
    engine = Engine(model, config, progress=SilentProgress())
    yield engine
    engine.close()


# -- one decode step ----------------------------------------------------------------------------


def test_the_contiguous_cache_gives_the_engines_tokens(model, engine):
    """The comparison would be of no use if the two did different work."""
    prompt, num_output = [7, 9, 11, 30, 5], 20
    request = engine.add_request("paged", prompt, greedy(num_output))
    while engine.has_unfinished:
        engine.step()
    paged = request.sequences[0].output_token_ids

    step = decode_step(model)
    cache = empty_cache(discover_layers(model.apply, model.params), 30, jnp.float32)
    token_ids = list(prompt)
    for position in range(len(prompt) + num_output - 1):
        token, at = jnp.array([[token_ids[position]], [position]], jnp.int32)
        cache, hidden = step(model.params, cache, token, at)
        if position >= len(prompt) - 1:
            token_ids.append(int(model.logits(model.params, hidden).argmax()))
    assert token_ids[len(prompt) :] == paged
    assert len(set(paged)) > 5


def test_a_decode_batch_is_at_the_length_asked_for(engine):
    batch, sizes = decode_batch(engine, 3, 13)
    assert (sizes.decodes, sizes.chunk_tokens, sizes.samples) == (4, 0, 4)
    assert batch.attn.seq_lens.tolist() == [13, 13, 13, 0]
    assert batch.positions.tolist() == [12, 12, 12, 0]
    assert not batch.from_device.any()
    blocks = batch.attn.block_tables[0, :3, :4]
    assert len(set(blocks.ravel().tolist())) == 12, "four blocks each, none shared"
    assert engine.scheduler.pools[0].num_referenced == 0, "the engine's own books are untouched"


@pytest.mark.parametrize(
    ("num_seqs", "context_len", "said"),
    [(5, 8, "max_num_seqs is 4"), (1, 64, "max_model_len 64"), (4, 60, "num_blocks=40")],
)
def test_a_decode_batch_that_does_not_fit(engine, num_seqs, context_len, said):
    with pytest.raises(ConfigError, match=said):
        decode_batch(engine, num_seqs, context_len)


def test_step_times_tell_the_variants_apart(engine, model):
    one = step_times(engine, model, batch_size=1, context_len=20, steps=2, rounds=3)
    for name in ("paged", "without_attention", "contiguous"):
        assert 0 < one[f"{name}_step_s"]["low"] <= one[f"{name}_step_s"]["median"]
        assert one[f"{name}_step_s"]["num"] == 3
    assert one["paged_by_contiguous"]["num"] == one["paged_by_without_attention"]["num"] == 3
    two = step_times(engine, model, batch_size=2, context_len=20, steps=1, rounds=1)
    assert "contiguous_step_s" not in two
    assert two["batch_size"] == 2


def test_without_attention_keys_and_values_are_still_computed(model):
    """XLA drops what nobody reads: the projections must not be among it."""
    from paged_jax.bench.step_times import _identity

    tokens = jnp.arange(4, dtype=jnp.int32)
    step = jax.jit(lambda params: model.apply(params, tokens, tokens, _identity))
    flop = step.lower(model.params).compile().cost_analysis()["flops"]
    assert flop >= 4 * 2 * ModelSize.of(model).num_matrix_params * 0.99


# -- what a model's work is ---------------------------------------------------------------------


def test_the_size_of_a_model(model, tmp_path):
    size = ModelSize.of(model)
    layer = 2 * HIDDEN + HIDDEN * (64 + 2 * 32 + 64) + 3 * 96 * HIDDEN
    assert size.num_matrix_params == layer + HIDDEN
    assert size.num_head_params == VOCAB * HIDDEN
    assert size.num_bytes_read == 4 * (layer + HIDDEN + VOCAB * HIDDEN)
    assert size.flop(10, 2) == 2 * (10 * (layer + HIDDEN) + 2 * VOCAB * HIDDEN)
    write_tiny_llama(tmp_path, num_hidden_layers=1, tie_word_embeddings=True)
    assert ModelSize.of(load_model(tmp_path, dtype="float32")) == size, "one table does both"


# -- the commands -------------------------------------------------------------------------------


def test_latency(directory, tmp_path, capsys):
    out = tmp_path / "out.json"
    sizes = ["--batch-sizes", "1", "2", "--input-len", "10", "--output-len", "6", "--repeat", "2"]
    argv = ["bench", "latency", str(directory), *sizes, *FLAGS, "--json", str(out)]
    assert cli.main(argv) == 0
    report = json.loads(out.read_text())
    assert [one["batch_size"] for one in report["batches"]] == [1, 2]
    for one in report["batches"]:
        assert one["seconds"]["num"] == 2
        assert one["ttft_s"]["median"] < one["seconds"]["median"]
        assert one["step"]["context_len"] == 10
        assert one["step_flop"] > 0
    one, two = report["batches"]
    kv_bytes = 2 * 2 * 16 * 4  # keys and values of one token in one layer, float32
    assert two["step_bytes"] - one["step_bytes"] == 10 * kv_bytes
    assert "machine" not in report
    said = capsys.readouterr().out
    assert "| batch |" in said
    assert "without attention, ms" in said


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (["--batch-sizes", "0"], "batch_sizes"),
        (["--input-len", "1"], "input_len must be at least 2"),
        (["--repeat", "0"], "repeat must be above 0"),
    ],
)
def test_latency_refuses_bad_sizes(flags, said, capsys):
    assert cli.main(["bench", "latency", "m", *flags]) == 2
    assert said in capsys.readouterr().err


def test_startup_cold_and_warm(directory, tmp_path, capsys):
    out = tmp_path / "out.json"
    flags = ["--skip-tokenizer-init", "--repeat", "1", "--max-num-seqs", "1", "--block-size", "4"]
    argv = ["bench", "startup", str(directory), *flags, "--max-num-batched-tokens", "16"]
    assert cli.main([*argv, "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    for kind in ("cold", "warm"):
        parts = [report[kind][name]["median"] for name in PHASES if name != "total_s"]
        assert sum(parts) == pytest.approx(report[kind]["total_s"]["median"], rel=1e-3)
        assert report[kind]["import_s"]["median"] > 0.1
        assert report[kind]["total_by_import_and_weights"] > 1.0
    assert report["cold"]["compile_s"]["median"] > report["warm"]["compile_s"]["median"]
    assert "| importing JAX and the engine" in capsys.readouterr().out


def test_a_start_that_fails_is_quoted(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(PagedJaxError, match="ModelLoadError"):
        start_once(EngineConfig(model=str(tmp_path)))


def test_quant_scores_a_text_in_every_form(tmp_path, monkeypatch, capsys):
    model, text, out = tmp_path / "tiny", tmp_path / "text.txt", tmp_path / "out.json"
    write_tiny_llama(model, num_hidden_layers=1, vocab_size=VOCAB_SIZE)
    write_tokenizer(model)
    text.write_text("The quick brown fox jumps over the lazy dog. " * 2)
    chosen = ("as it is", "weights int8", "weights int4")
    monkeypatch.setattr(quant, "VARIANTS", {name: quant.VARIANTS[name] for name in chosen})
    flags = ["--tokens", "16", "--text", str(text), "--json", str(out)]
    assert cli.main(["bench", "quant", str(model), *flags, *FLAGS[:2]]) == 0
    exact, int8, int4 = json.loads(out.read_text())["variants"]
    assert [row["variant"] for row in (exact, int8, int4)] == list(chosen)
    assert exact["mean_difference"] == 0 and exact["same_best"] == 1
    assert 0 < int8["mean_difference"] < int4["mean_difference"] < int4["largest_difference"]
    assert int4["same_best"] <= int8["same_best"] <= 1
    assert int8["perplexity"] == pytest.approx(exact["perplexity"], rel=0.02)
    assert int4["weight_bytes"] < int8["weight_bytes"] < exact["weight_bytes"] / 2
    assert "texts of 16 tokens of text.txt" in capsys.readouterr().out

    text.write_text("short")
    assert cli.main(["bench", "quant", str(model), *flags, *FLAGS[:2]]) == 2
    assert "tokens, and one text takes 16" in capsys.readouterr().err


def test_host(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(host, "CASES", ((4, 0, 400), (4, 50, 400)))
    monkeypatch.setattr(host, "QUEUES", (0, 20))
    out = tmp_path / "out.json"
    assert cli.main(["bench", "host", "--steps", "20", "--json", str(out)]) == 0
    report = json.loads(out.read_text())
    assert [one["num_waiting"] for one in report["steps"]] == [0, 50]
    for one in report["steps"]:
        parts = one["schedule_ms"] + one["make_batch_ms"] + one["update_ms"]
        assert parts == pytest.approx(one["step_ms"], rel=0.5)
        assert one["step_p99_ms"] >= one["step_ms"]
    assert all(one["add_us"] > 0 < one["abort_us"] for one in report["queue"])
    assert "| running | waiting |" in capsys.readouterr().out


def test_the_host_is_measured_on_the_steps_it_names():
    """Everybody decodes, at the length it says; nobody waiting is let in."""
    scheduler, buckets = host.running_scheduler(4, 10, 400)
    assert [s.num_computed_tokens >= 1000 for s in scheduler.running] == [True] * 4
    before = [s.num_computed_tokens for s in scheduler.running]
    times = host.timed_step(scheduler, buckets)
    assert len(times) == len(host.PARTS)
    assert [s.num_computed_tokens for s in scheduler.running] == [n + 1 for n in before]
    assert scheduler.num_waiting == 10


def test_calibrate_measures_every_way():
    rates = calibrate(jax.devices()[0], num_bytes=2**16, matrix_size=32, repeat=2)
    assert set(rates.ways) == {"xla sum", "xla matmul", "numpy dot", "numpy matmul"}
    assert rates.read_bytes_s == max(rates.ways["xla sum"], rates.ways["numpy dot"])
    assert rates.matmul_flop_s == max(rates.ways["xla matmul"], rates.ways["numpy matmul"])
    assert rates.facts()[0][0].startswith(f"reads memory, {rates.num_threads} threads")


def test_calibrate_as_a_command(tmp_path, monkeypatch, capsys):
    from paged_jax.bench import calibrate as module

    small = calibrate(jax.devices()[0], num_bytes=2**16, matrix_size=32, repeat=1)
    monkeypatch.setattr(module, "calibrate", lambda device: small)
    out = tmp_path / "out.json"
    assert cli.main(["bench", "calibrate", "--device", "cpu", "--json", str(out)]) == 0
    assert json.loads(out.read_text())["matmul_flop_s"] > 0
    assert "GFLOP/s" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["offline", "serve", "latency", "startup", "host", "calibrate"])
def test_every_benchmark_has_help(name, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["bench", name, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: paged-jax bench {name}" in capsys.readouterr().out
