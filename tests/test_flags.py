"""Flags made from a dataclass, and its keywords made from the flags."""

import argparse
from dataclasses import dataclass, field
from typing import Literal

import pytest

from paged_jax import EngineConfig
from paged_jax.flags import add_flags, chosen


@dataclass(frozen=True, kw_only=True)
class Config:
    name: str = field(metadata={"doc": "who", "group": "People"})
    num_things: int = field(default=3, metadata={"doc": "how many, at 100%"})
    share: float | None = field(default=None, metadata={"doc": "of the whole"})
    quiet: bool = field(default=False, metadata={"doc": "say nothing"})
    cached: bool = field(default=True, metadata={"doc": "remember"})
    stop: str | tuple[str, ...] | list[str] = field(default=(), metadata={"doc": "where to stop"})
    ids: tuple[int, ...] | list[int] = field(default=(), metadata={"doc": "numbers"})
    kind: str = field(default="a", metadata={"doc": "which", "choices": ("a", "b")})
    prefix: Literal["x", "y"] = field(default="x", metadata={"doc": "before"})


def parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(prog="prog")
    add_flags(made, Config)
    return made


def read(*flags: str) -> dict:
    return chosen(parser().parse_args(flags), Config)


def test_only_what_was_given_is_passed_on():
    assert read() == {}
    assert read("--num-things", "5") == {"num_things": 5}


@pytest.mark.parametrize(
    ("flags", "value"),
    [
        (["--name", "Ada"], {"name": "Ada"}),
        (["--share", "0.5"], {"share": 0.5}),
        (["--quiet"], {"quiet": True}),
        (["--no-cached"], {"cached": False}),
        (["--stop", "a", "--stop", "b c"], {"stop": ["a", "b c"]}),
        (["--ids", "1", "--ids", "2"], {"ids": [1, 2]}),
        (["--kind", "b"], {"kind": "b"}),
        (["--prefix", "y"], {"prefix": "y"}),
    ],
)
def test_every_type_of_field_is_read(flags, value):
    assert read(*flags) == value


@pytest.mark.parametrize(
    "flags", [["--num-things", "many"], ["--kind", "c"], ["--prefix", "z"], ["--unknown", "1"]]
)
def test_a_bad_value_is_a_usage_error(flags, capsys):
    with pytest.raises(SystemExit) as exit_info:
        read(*flags)
    assert exit_info.value.code == 2
    assert flags[0] in capsys.readouterr().err


def test_help_shows_groups_documents_and_defaults():
    text = " ".join(parser().format_help().split())
    assert "People:" in text
    assert "how many, at 100% (default: 3)" in text
    assert "--cached, --no-cached remember (default: on)" in text
    assert "say nothing (default" not in text


def test_help_shows_the_callers_defaults_in_place_of_the_dataclasss():
    made = argparse.ArgumentParser()
    add_flags(made, Config, group="Things", defaults={"num_things": 9})
    text = " ".join(made.format_help().split())
    assert "how many, at 100% (default: 9)" in text
    assert "Things:" in text
    assert chosen(made.parse_args([]), Config) == {}


def test_every_engine_field_has_a_flag_and_a_line_of_help():
    made = argparse.ArgumentParser()
    add_flags(made, EngineConfig, leave_out={"model"})
    flags = {action.dest: action for action in made._actions}
    for name in EngineConfig.__dataclass_fields__:
        assert name == "model" or flags[name].help
    config = EngineConfig(
        model="m",
        **chosen(made.parse_args(["--max-num-seqs", "4", "--no-overlap"]), EngineConfig),
    )
    assert (config.max_num_seqs, config.overlap) == (4, False)


def test_a_type_without_a_flag_is_a_bug_that_is_named():
    @dataclass
    class Odd:
        table: dict = field(default_factory=dict, metadata={"doc": "?"})

    with pytest.raises(TypeError, match="table"):
        add_flags(argparse.ArgumentParser(), Odd)
