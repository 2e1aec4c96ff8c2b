"""`paged-jax bench offline` with a model: a tiny random one on disk."""

import json

import pytest
import tokenizers

from paged_jax import cli
from tests.tiny_models import write_tiny_llama

# Whole batches fit into a step, and few programs are to be compiled.
SIZES = ["--max-num-seqs", "4", "--max-num-batched-tokens", "32", "--block-size", "4"]
FLAGS = [*SIZES, "--no-calibrate"]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    directory = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_llama(directory, num_hidden_layers=1)
    return str(directory)


@pytest.fixture(scope="module")
def trace(tmp_path_factory):
    """Eight requests whose prompts of 7 begin with the same 6 tokens, over half a second."""
    lines = [
        {
            "id": i,
            "arrival_s": 0.05 * i,
            "prompt_token_ids": [*range(10, 16), 40 + i],
            "max_tokens": 2 + 3 * (i % 4),
        }
        for i in range(8)
    ]
    path = tmp_path_factory.mktemp("traces") / "eight.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return str(path)


def bench(tmp_path, tiny, trace, *flags):
    out = tmp_path / "out.json"
    argv = ["bench", "offline", tiny, "--trace", trace, "--json", str(out), *FLAGS, *flags]
    assert cli.main(argv) == 0
    return json.loads(out.read_text())


def test_a_run_says_everything_about_itself(tmp_path, tiny, trace, capsys):
    report = bench(tmp_path, tiny, trace)
    assert report["requests"] == 8
    assert report["output_tokens"] == 2 * (2 + 5 + 8 + 11)
    assert report["prompt_tokens"] == 8 * 7
    assert report["total_tok_s"] == pytest.approx((52 + 56) / report["seconds"], rel=1e-3)
    assert report["output_tok_s"] == pytest.approx(52 / report["seconds"], rel=1e-3)
    assert 0 < report["host_s"] + report["device_s"] <= report["seconds"]
    assert report["compiles"] == 0
    assert report["warm_up"]["programs"] > 0
    assert report["warm_up"]["seconds"] > 0
    assert report["prefix_hit_tokens"] == 7 * 4
    assert report["prefill_tokens"] == 56 - 7 * 4
    assert report["ttft_s"]["p50"] <= report["e2el_s"]["max"] <= report["seconds"]
    assert report["model"] == "tiny"
    assert report["config"]["max_num_seqs"] == 4
    assert report["config"]["num_blocks"] > 1
    assert report["environment"]["num_cpus"] >= 1
    assert "total tokens/s" in capsys.readouterr().out


def test_repeated_runs_start_with_an_empty_cache(tmp_path, tiny, trace):
    report = bench(tmp_path, tiny, trace, "--repeat", "3", "--num-prompts", "4")
    assert report["seconds_spread"]["num"] == 3
    assert report["seconds_spread"]["median"] == report["seconds"]
    assert report["prefix_hit_tokens"] == 3 * 4


def test_requests_can_come_when_they_arrive(tmp_path, tiny, trace):
    report = bench(tmp_path, tiny, trace, "--arrivals")
    assert report["seconds"] >= 0.35
    assert report["ttft_s"]["p50"] < 0.15, "counted from the arrival, not from the start"


def test_comparison_of_a_real_model(tmp_path, tiny, trace, capsys):
    report = bench(tmp_path, tiny, trace, "--compare")
    runs = report["runs"]
    assert list(runs) == [
        "static+reserved",
        "continuous+reserved",
        "static+paged",
        "continuous+paged",
        "continuous+paged+prefix",
    ]
    for run in runs.values():
        assert run["compiles"] == 0
        assert run["output_tokens"] == 52
    assert runs["static+paged"]["decode_steps"] > runs["continuous+paged"]["decode_steps"]
    assert runs["continuous+paged+prefix"]["prefix_hit_tokens"] == 7 * 4
    assert runs["continuous+paged"]["prefix_hit_tokens"] == 0
    assert report["ratios"]["static+reserved"]["seconds"] == 1.0
    assert report["control"]["ratios"]["decode_steps"] <= 1.05
    assert report["prefix"]["saved_share"] == 1.0
    assert report["config"]["max_model_len"] == 7 + 11
    assert report["config"]["num_blocks"] == 4 * 5 + 2
    assert "| continuous+paged " in capsys.readouterr().out


def test_a_peer_takes_turns(tmp_path, tiny, trace, capsys):
    said = tmp_path / "said"
    command = f"""sh -c 'echo run >> {said}; echo "{{\\"total_tok_s\\": 0.5}}"'"""
    report = bench(tmp_path, tiny, trace, "--num-prompts", "2", "--against", command)
    assert said.read_text() == "run\n" * 3, "three rounds, when nothing else is asked for"
    assert report["seconds_spread"]["num"] == 3
    ratio = report["against"][command]["total_tok_s_ratio"]
    assert ratio["num"] == 3
    assert ratio["high"] == pytest.approx(
        report["total_tok_s"] * report["seconds"] / report["seconds_spread"]["low"] / 0.5, rel=1e-3
    )
    assert "times sh -c" in capsys.readouterr().out


def test_shares_of_the_machine_are_told(tmp_path, tiny, trace, monkeypatch, capsys):
    from paged_jax.bench import calibrate

    rates = calibrate.Rates("cpu", 2, 1e9, 1e9, {})
    monkeypatch.setattr(calibrate, "calibrate", lambda device: rates)
    report = bench(tmp_path, tiny, trace, "--num-prompts", "2", "--calibrate")
    assert report["machine"]["matmul_flop_s"] == 1e9
    assert report["matmul_share"] == pytest.approx(report["flop_s"] / 1e9, rel=1e-3)
    assert "share of it that the model's products reached" in capsys.readouterr().out


def test_texts_are_encoded_by_the_models_tokenizer(tmp_path):
    directory, file = tmp_path / "worded", tmp_path / "texts.jsonl"
    write_tiny_llama(directory, num_hidden_layers=1)
    words = {f"w{i}": i for i in range(160)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(directory / "tokenizer.json"))
    file.write_text('{"prompt": "w9 w8 w7", "max_tokens": 2}\n')
    assert bench(tmp_path, str(directory), str(file))["prompt_tokens"] == 3


@pytest.mark.parametrize(
    ("line", "said"),
    [
        (
            {"prompt_token_ids": [5, 999], "max_tokens": 2},
            "request 0 of the trace holds token id 999, where the vocabulary",
        ),
        ({"prompt_token_ids": [5, 6], "max_tokens": 600}, "request 0 of the trace has 602 tokens"),
    ],
)
def test_a_trace_that_does_not_fit_the_model_is_named(line, said, tmp_path, tiny, capsys):
    file = tmp_path / "bad.jsonl"
    file.write_text(json.dumps(line))
    assert cli.main(["bench", "offline", tiny, "--trace", str(file), *FLAGS]) == 2
    assert said in capsys.readouterr().err
