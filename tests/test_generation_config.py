"""What a model recommends for sampling: read, said at start, and left out where asked."""

import json
from pathlib import Path

import pytest

from paged_jax import Engine
from paged_jax.generation_config import read_generation_config
from tests.tiny_models import write_tiny_llama


class Sayings:
    """A progress that remembers what it was told."""

    def __init__(self):
        self.said: list[str] = []

    def say(self, text: str) -> None:
        self.said.append(text)

    def track(self, text: str, total: int, *, unit: str = ""):
        from paged_jax.progress import SilentProgress

        return SilentProgress().track(text, total, unit=unit)


def write(directory: Path, **generation) -> Path:
    write_tiny_llama(directory)
    (directory / "generation_config.json").write_text(json.dumps(generation))
    return directory


RECOMMENDED = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}


def test_numbers_are_read_and_what_is_none_is_left_out(tmp_path):
    found = read_generation_config(
        write(tmp_path, **RECOMMENDED, do_sample=True, min_p=None, eos_token_id=[5, 6])
    )
    assert found.sampling == RECOMMENDED
    assert found.eos_token_ids == {5, 6}
    odd = read_generation_config(write(tmp_path, temperature="hot", top_p=True))
    assert odd.sampling == {}


def test_a_model_that_does_not_sample_is_greedy_and_keeps_its_penalty(tmp_path):
    found = read_generation_config(write(tmp_path, **RECOMMENDED, do_sample=False))
    assert found.sampling == {"temperature": 0.0, "repetition_penalty": 1.05}


@pytest.mark.parametrize("choice", ["auto", "none"])
def test_the_recommendation_is_said_and_can_be_left_out(tmp_path, choice):
    sayings = Sayings()
    engine = Engine.from_pretrained(
        str(write(tmp_path, **RECOMMENDED)),
        progress=sayings,
        skip_tokenizer_init=True,
        generation_config=choice,
        num_blocks=8,
    )
    said = [line for line in sayings.said if "temperature 0.7" in line]
    assert engine.generation_defaults == (RECOMMENDED if choice == "auto" else {})
    assert len(said) == (1 if choice == "auto" else 0)
    engine.close()
