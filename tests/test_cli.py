"""The command line: what each command passes on, prints and returns."""

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
import tokenizers

import paged_jax
import serve
from paged_jax import EngineConfig, RequestError, SamplingParams, cli, doctor, generate, hub, llm
from paged_jax.engine_stats import EngineStats
from paged_jax.generation_config import SAMPLING_FIELDS
from paged_jax.jobs import Job
from paged_jax.outputs import CompletionOutput, RequestOutput
from tests.tiny_models import write_tiny_llama

STATS = replace(
    EngineStats.empty(EngineConfig(model="fake")),
    num_requests=8,
    prompt_tokens=200,
    generation_tokens=500,
    num_steps=70,
    mean_occupancy=0.45,
    max_num_seqs=16,
    mean_block_utilization=0.93,
    preemptions=1,
)


def answer(
    text: str, *, finished: bool = True, prompt: str | None = "q", reason: str = "stop", n: int = 1
) -> RequestOutput:
    parts = tuple(
        CompletionOutput(i, text, (5, 6), reason if finished else None, None) for i in range(n)
    )
    return RequestOutput("r", prompt, (1, 2, 3), parts, finished)


class FakeTokenizer:
    """Words to their lengths."""

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        return [len(word) for word in text.split()]

    def apply_chat_template(self, messages: Sequence[dict]) -> str:
        return " ".join(f"<{message['role']}> {message['content']}" for message in messages)


class FakeLLM:
    """Answers `text` with `echo: text`, in two pieces; the last prompt is answered first."""

    def __init__(self, model: str, **config):
        self.config = EngineConfig(model=model, **config)
        self.tokenizer = None if self.config.skip_tokenizer_init else FakeTokenizer()
        self.engine = SimpleNamespace(
            generation_defaults={"top_p": 0.9}, check_request=self.check_request
        )
        self.reason = "stop"
        self.params: list[SamplingParams] = []
        made.append(self)

    def check_request(self, token_ids, params):
        if len(token_ids) > 10:
            raise RequestError("the prompt is too long", param="prompt")

    def stats(self) -> EngineStats:
        return STATS

    def stream(self, encoded, params, *, use_progress):
        assert not use_progress
        self.params = params
        for index in reversed(range(len(encoded))):
            text, token_ids = encoded[index]
            whole = f"echo: {text or list(token_ids)}"
            yield index, answer(whole[:7], finished=False, prompt=text)
            yield index, answer(whole, prompt=text, reason=self.reason, n=params[index].n)


made: list[FakeLLM] = []


@pytest.fixture(autouse=True)
def fake_llm(monkeypatch):
    made.clear()
    monkeypatch.setattr(llm, "LLM", FakeLLM)


# -- the frame ----------------------------------------------------------------------------------


def test_version_and_usage(capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main(["--version"])
    assert exit_info.value.code == 0
    assert capsys.readouterr().out == f"paged-jax {paged_jax.__version__}\n"
    for argv in ([], ["nothing"], ["pull"], ["generate", "m", "--no-such-flag"]):
        with pytest.raises(SystemExit) as exit_info:
            cli.main(argv)
        assert exit_info.value.code == 2
        assert "usage: paged-jax" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["pull", "generate", "serve", "doctor"])
def test_every_command_has_help(command, capsys):
    with pytest.raises(SystemExit) as exit_info:
        cli.main([command, "--help"])
    assert exit_info.value.code == 0
    assert f"usage: paged-jax {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code", "said"),
    [
        (paged_jax.ModelNotFoundError("no model 'x'"), 2, "paged-jax: no model 'x'\n"),
        (paged_jax.ModelLoadError("damaged"), 2, "paged-jax: damaged\n"),
        (paged_jax.RequestError("bad prompt"), 2, "paged-jax: bad prompt\n"),
        (paged_jax.EngineDeadError("it died"), 1, "paged-jax: it died\n"),
        (KeyboardInterrupt(), 130, ""),
    ],
)
def test_errors_become_a_line_and_an_exit_code(error, code, said, monkeypatch, capsys):
    def fail(model):
        raise error

    monkeypatch.setattr(hub, "pull", fail)
    assert cli.main(["pull", "x"]) == code
    assert capsys.readouterr().err == said


def test_a_reader_that_leaves_ends_us_quietly():
    code = """
import sys
from paged_jax import cli, doctor
doctor.run_doctor = lambda: print("line\\n" * 100_000)
sys.exit(cli.main(["doctor"]))
"""
    with subprocess.Popen(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    ) as process:
        process.stdout.read(10)
        process.stdout.close()
        assert process.stderr.read() == b""
        assert process.wait(timeout=60) == 1


# -- pull, doctor, serve ------------------------------------------------------------------------


def test_pull_says_where_the_model_is(monkeypatch, capsys, tmp_path):
    monkeypatch.setattr(hub, "pull", lambda model: hub.ModelFiles(tmp_path, model))
    assert cli.main(["pull", "smollm2"]) == 0
    assert capsys.readouterr().out == f"smollm2 is ready in {tmp_path}\n"


def test_doctor_passes_its_exit_code_on(monkeypatch):
    monkeypatch.setattr(doctor, "run_doctor", lambda: 3)
    assert cli.main(["doctor"]) == 3


def test_serve_passes_everything_on(monkeypatch):
    calls = []
    monkeypatch.setattr(serve, "run_server", lambda *args, **kw: calls.append((args, kw)) or 7)
    flags = "--port 9 --host 0.0.0.0 --max-num-seqs 4 --served-model-name m2 --strict-fields"
    assert cli.main(["serve", "m", *flags.split()]) == 7
    ((config, options), where) = calls[0]
    assert config == EngineConfig(model="m", max_num_seqs=4, served_model_name="m2", warmup="full")
    assert options == serve.ServeOptions(strict_fields=True)
    assert where == {"host": "0.0.0.0", "port": 9}
    assert cli.main(["serve", "m", "--warmup", "lazy"]) == 7
    assert calls[1][0][0].warmup == "lazy"
    assert calls[1][1] == {"host": "127.0.0.1", "port": 8000}


@pytest.mark.parametrize(
    ("flags", "said"),
    [("--max-body-bytes 0", "max_body_bytes must be positive"), ("--block-size 0", "block_size")],
)
def test_serve_refuses_bad_values(flags, said, capsys):
    assert cli.main(["serve", "m", *flags.split()]) == 2
    assert said in capsys.readouterr().err


def test_api_keys_come_from_flags_a_file_and_the_environment(monkeypatch, tmp_path, capsys):
    calls = []
    monkeypatch.setattr(serve, "run_server", lambda *args, **kw: calls.append(args) or 0)
    monkeypatch.setenv("PAGED_JAX_API_KEY", "from-environment")
    keys = tmp_path / "keys"
    keys.write_text("one\n\n  two  \r\n")
    flags = ["--api-key", "a", "--api-key", "b", "--api-key-file", str(keys)]
    assert cli.main(["serve", "m", *flags]) == 0
    options = calls[0][1]
    assert options.api_key == ("a", "b", "from-environment", "one", "two")
    assert "from-environment" not in repr(options)
    keys.write_text("\n")
    for path, said in ((keys, "holds no key"), (tmp_path / "none", "cannot be read")):
        assert cli.main(["serve", "m", "--api-key-file", str(path)]) == 2
        assert said in capsys.readouterr().err
    assert cli.main(["serve", "m", "--api-key", "two words"]) == 2
    assert "two words" not in capsys.readouterr().err
    assert len(calls) == 1


# -- generate -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ([], "nothing to answer"),
        (["--input", "missing.jsonl"], "missing.jsonl cannot be read: No such file"),
        (["--input", "in.jsonl"], "in.jsonl, line 2: unknown field 'temprature'"),
        (["-p", "a", "--output", "no/such/folder"], "no/such/folder cannot be written"),
        (["-p", "a", "--input", "ok.jsonl", "--output", "ok.jsonl"], "overwrite the input"),
        (["-p", "a", "--temperature", "-1"], "temperature must be between"),
    ],
)
def test_bad_input_is_found_before_the_model_is_loaded(flags, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "in.jsonl").write_text('{"prompt": "a"}\n{"prompt": "b", "temprature": 0}\n')
    (tmp_path / "ok.jsonl").write_text('{"prompt": "a"}\n')
    assert cli.main(["generate", "m", *flags]) == 2
    assert said in capsys.readouterr().err
    assert not made
    assert (tmp_path / "ok.jsonl").read_text() == '{"prompt": "a"}\n'


def test_a_request_that_the_engine_refuses_is_named_and_nothing_is_started(capsys, tmp_path):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a"}\n{"prompt": "' + "a " * 11 + '"}\n')
    assert cli.main(["generate", "m", "--input", str(file)]) == 2
    assert f"{file}, line 2: the prompt is too long" in capsys.readouterr().err
    assert made[0].params == []


def test_one_prompt_into_a_pipe_is_its_answer_and_nothing_else(capsys):
    assert cli.main(["generate", "m", "-p", "hi", "--max-num-seqs", "3", "--seed", "5"]) == 0
    out, err = capsys.readouterr()
    assert out == "echo: hi\n"
    assert err.startswith("\n8 requests in ")
    assert made[0].config == EngineConfig(model="m", max_num_seqs=3, seed=5)
    assert made[0].params == [SamplingParams(max_tokens=128, top_p=0.9)]


def test_several_prompts_come_under_their_headings(capsys):
    assert cli.main(["generate", "m", "-p", "one", "-p", "two " * 30, "--n", "2"]) == 2
    assert "prompt 2: the prompt is too long" in capsys.readouterr().err
    assert cli.main(["generate", "m", "-p", "one", "-p", "a" * 80, "--n", "2"]) == 0
    assert capsys.readouterr().out == (
        f"\n[2 of 2] {'a' * 69}...\n(1)\necho: {'a' * 80}\n(2)\necho: {'a' * 80}\n"
        "\n[1 of 2] one\n(1)\necho: one\n(2)\necho: one\n"
    )


def test_help_says_which_fields_the_model_has_a_word_on():
    assert set(generate.RECOMMENDED) == set(SAMPLING_FIELDS)


def test_flags_and_lines_choose_the_sampling(tmp_path, capsys):
    file = tmp_path / "in.jsonl"
    file.write_text('{"prompt": "a", "top_p": 0.1, "seed": 3}\n{"prompt_token_ids": [7]}\n')
    flags = ["--temperature", "0", "--stop", "x", "--stop", "y", "--input", str(file)]
    assert cli.main(["generate", "m", "-p", "hi", *flags]) == 0
    common = {"temperature": 0, "stop": ("x", "y"), "max_tokens": 128}
    assert made[0].params == [
        SamplingParams(**common, top_p=0.9),
        SamplingParams(**common, top_p=0.1, seed=3),
        SamplingParams(**common, top_p=0.9),
    ]
    assert "[3 of 3] (7,)\necho: [7]" in capsys.readouterr().out


def test_chat_applies_the_template(capsys, monkeypatch):
    assert cli.main(["generate", "m", "--chat", "-p", "hi"]) == 0
    assert capsys.readouterr().out == "echo: <user> hi\n"


def test_without_a_tokenizer_only_token_ids_are_answered(capsys):
    assert cli.main(["generate", "m", "--skip-tokenizer-init", "-p", "hi"]) == 2
    assert "prompt 1: without a tokenizer" in capsys.readouterr().err


def test_output_is_json_lines_in_the_prompts_order(tmp_path, capsys, monkeypatch):
    out = tmp_path / "out.jsonl"
    assert cli.main(["generate", "m", "-p", "naïve", "-p", "b", "--output", str(out)]) == 0
    assert capsys.readouterr().out == ""
    first, second = map(json.loads, out.read_text(encoding="utf-8").splitlines())
    assert "naïve" in out.read_text(encoding="utf-8")
    assert second["index"] == 1
    assert first == {
        "index": 0,
        "prompt": "naïve",
        "outputs": [
            {
                "index": 0,
                "text": "echo: naïve",
                "token_ids": [5, 6],
                "finish_reason": "stop",
                "stop_reason": None,
                "logprobs": None,
                "cumulative_logprob": None,
            }
        ],
        "num_prompt_tokens": 3,
        "num_cached_tokens": 0,
    }


def test_input_and_output_may_be_the_standard_streams(capsys, monkeypatch):
    stdin = SimpleNamespace(buffer=[b'{"prompt": "x"}\n', b'{"prompt": "y"}\n'])
    monkeypatch.setattr(sys, "stdin", stdin)
    assert cli.main(["generate", "m", "--input", "-", "--output", "-"]) == 0
    lines = [json.loads(line) for line in capsys.readouterr().out.splitlines()]
    assert [line["outputs"][0]["text"] for line in lines] == ["echo: x", "echo: y"]


def test_an_answer_that_ended_in_an_error_fails_the_run(monkeypatch, capsys):
    class Failing(FakeLLM):
        def stream(self, encoded, params, *, use_progress):
            yield 0, answer("", reason="error")

    monkeypatch.setattr(llm, "LLM", Failing)
    assert cli.main(["generate", "m", "-p", "hi"]) == 1


def test_an_interrupted_run_keeps_what_it_finished(tmp_path, monkeypatch):
    class Interrupted(FakeLLM):
        def stream(self, encoded, params, *, use_progress):
            yield 1, answer("second")
            raise KeyboardInterrupt

    monkeypatch.setattr(llm, "LLM", Interrupted)
    out = tmp_path / "out.jsonl"
    assert cli.main(["generate", "m", "-p", "a", "-p", "b", "--output", str(out)]) == 130
    assert [json.loads(line)["index"] for line in out.read_text().splitlines()] == [1]


class Terminal:
    """A stream that says it is a terminal."""

    def __init__(self):
        self.text = ""

    def isatty(self) -> bool:
        return True

    def write(self, text: str) -> None:
        self.text += text

    def flush(self) -> None:
        pass


def test_one_prompt_on_a_terminal_is_answered_live(monkeypatch):
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    seen = []

    class Watched(FakeLLM):
        def stream(self, *args, **kw):
            for item in super().stream(*args, **kw):
                yield item
                seen.append(terminal.text)

    monkeypatch.setattr(llm, "LLM", Watched)
    assert cli.main(["generate", "m", "-p", "hi there"]) == 0
    assert seen == ["echo: h", "echo: hi there\n"]


def test_the_log_of_a_long_run_says_how_far_it_is(monkeypatch, capsys):
    monkeypatch.setattr(generate, "SAY_EVERY_S", -1.0)
    with generate.watched(2, on_terminal=False) as advance:
        advance()
        advance()
    assert capsys.readouterr().err == "1 of 2 answered\n2 of 2 answered\n"
    monkeypatch.undo()
    with generate.watched(2, on_terminal=False) as advance:
        advance()
    assert capsys.readouterr().err == ""


def test_a_bar_leaves_standard_output_alone(monkeypatch):
    """Answers go to a file while the bar is on the terminal: they must not end up in the bar."""
    terminal, file = Terminal(), Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setattr(sys, "stdout", file)
    with generate.watched(1, on_terminal=False) as advance:
        print("an answer")
        advance()
    assert file.text == "an answer\n"
    assert "answering" in terminal.text


def test_the_figures_are_one_line():
    assert generate.figures(STATS, 12.0, 2.0) == (
        "8 requests in 10.0 s (and 2.0 s of compiling); 200 tokens in (20/s); 500 out (50/s); "
        "70 steps, 7.2 of 16 slots busy; blocks 93% full; 1 preemption"
    )
    cached = replace(STATS, num_requests=1, prefix_hit_tokens=64)
    line = generate.figures(cached, 10.0, 0.0)
    assert line.startswith("1 request in 10.0 s; 200 tokens in (20/s, 64 from the cache)")


def test_a_job_is_shown_by_what_was_said_last():
    messages = ({"role": "system", "content": "s"}, {"role": "user", "content": "Hi"})
    assert Job("here", {}, messages=messages).shown == "Hi"


# -- all of it ----------------------------------------------------------------------------------


@pytest.fixture
def tiny(tmp_path):
    """A random Llama with a vocabulary of 160 words and a chat template."""
    directory = tmp_path / "tiny"
    write_tiny_llama(directory)
    words = {f"w{i}": i for i in range(160)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.save(str(directory / "tokenizer.json"))
    template = "w3 {% for m in messages %}{{ m['content'] }} {% endfor %}w4"
    (directory / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    return directory


def test_a_model_answers_on_the_command_line(tiny, tmp_path, monkeypatch, capsys):
    monkeypatch.undo()  # the real LLM
    file, out = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    file.write_text(
        '{"prompt": "w7 w8 w9", "max_tokens": 4}\n'
        '{"prompt_token_ids": [7, 8, 9], "max_tokens": 6}\n'
        '{"messages": [{"role": "user", "content": "w8"}], "n": 2}\n'
    )
    sampling = ["--temperature", "0", "--max-tokens", "5", "--ignore-eos"]
    flags = ["--num-blocks", "32", "--max-num-seqs", "4", "--max-num-batched-tokens", "32"]
    io = ["--input", str(file), "--output", str(out)]
    assert cli.main(["generate", str(tiny), "-p", "w7 w8 w9", *io, *sampling, *flags]) == 0
    lines = [json.loads(line) for line in out.read_text().splitlines()]
    ids = [[part["token_ids"] for part in line["outputs"]] for line in lines]
    assert [[len(tokens) for tokens in sample] for sample in ids] == [[5], [4], [6], [5, 5]]
    assert ids[0][0][:4] == ids[1][0] == ids[2][0][:4], "equal prompts, greedily answered"
    assert ids[3][0] == ids[3][1]
    assert [line["prompt"] for line in lines] == ["w7 w8 w9", "w7 w8 w9", None, "w3 w8 w4"]
    assert [line["num_prompt_tokens"] for line in lines] == [3, 3, 3, 3]
    assert {part["finish_reason"] for line in lines for part in line["outputs"]} == {"length"}
    words = lines[0]["outputs"][0]["text"].split()
    assert words == [f"w{token}" for token in ids[0][0]]
    err = capsys.readouterr().err
    assert "4 requests in " in err
    assert "12 tokens in " in err
    assert "25 out " in err
