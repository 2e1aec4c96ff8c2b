"""Sampling fields: what is refused, by name, and at once."""

import dataclasses
import math
import time
import tracemalloc

import numpy as np
import pytest

from scheduler import RequestError, SamplingParams, StructuredOutputs

NOT_NUMBERS = ["hot", None, [], {}, True, math.nan, math.inf, -math.inf, 1j]
NOT_INTEGERS = ["1", None, [], 1.0, 1.5, True, math.nan]

BAD = {
    "n": [*NOT_INTEGERS, 0, -1, 129, 10**6, 2**64],
    "temperature": [*NOT_NUMBERS, -0.1, -1, 1e7],
    "top_k": [*NOT_INTEGERS, -2, 2**31],
    "top_p": [*NOT_NUMBERS, -0.1, 1.1],
    "min_p": [*NOT_NUMBERS, -0.1, 1.1],
    "seed": [*[value for value in NOT_INTEGERS if value is not None], 2**64, -(2**63) - 1],
    "max_tokens": [*[value for value in NOT_INTEGERS if value is not None], -1, 2**31],
    "stop": [1, None, [1], [None], "", [""], ["a", ""], ("a", b"b"), b"a", {"a"}, "x" * 1025],
    "stop_token_ids": [1, "1", None, ["1"], [1.0], [-1], [True], [None], [2**31], {1}],
    "min_tokens": [*NOT_INTEGERS, -1, 17, 2**31],
    "logit_bias": [1, {"x": 1}, {-1: 1}, {"-1": 1}, {1.5: 1}, {1: "a"}, {1: 101}, [1], [(1,)]],
    "allowed_token_ids": [1, "1", [], ["1"], [1.0], [-1], [True], [2**31], {1}],
    "bad_words": ["a", [1], [""], ["x" * 257], [None], {"a"}, 1],
    "structured_outputs": [1, "a", [], {}, {"regexp": "a"}],
    "logprobs": [*[value for value in NOT_INTEGERS if value is not None], -1, 21, 2**31],
    "prompt_logprobs": [*[value for value in NOT_INTEGERS if value is not None], -1, 21],
    "logprobs_mode": ["cooked", None, 1, True],
    "ignore_eos": [1, 0, "true", None],
    "include_stop_str_in_output": [1, "false", None],
    "skip_special_tokens": [0, "yes", None],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD.items() for value in values]
)
def test_a_bad_value_names_its_field(name, value):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert str(refused.value).startswith(name)


@pytest.mark.parametrize("name", BAD)
def test_the_message_says_the_value_or_its_size(name):
    value = BAD[name][0]
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert repr(value) in str(refused.value)


GOOD = {
    "n": [1, 128, np.int64(3)],
    "temperature": [0, 0.0, 1, 1e6, np.float32(0.5)],
    "top_k": [-1, 0, 1, 2**31 - 1, np.int32(5)],
    "top_p": [0, 0.0, 1, 1.0, 1e-9],
    "min_p": [0, 1, 0.5],
    "seed": [None, 0, -1, -(2**63), 2**64 - 1],
    "max_tokens": [None, 0, 1, 2**31 - 1],
    "stop": ["a", ["a"], ("a", "b"), [], (), "x" * 1024, ["\u00e9"] * 64],
    "stop_token_ids": [[], (), [0], (0, 2**31 - 1), [1] * 256],
    "min_tokens": [0, 16],
    "allowed_token_ids": [None, [0], (5, 2**31 - 1)],
    "bad_words": [[], ["a"], ("x" * 256,), ["b"] * 256],
    "logprobs": [None, 0, 20],
    "prompt_logprobs": [None, 0, 20],
    "logprobs_mode": ["raw", "processed"],
    "ignore_eos": [True, False],
    "include_stop_str_in_output": [True, False],
    "skip_special_tokens": [True, False],
}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in GOOD.items() for value in values]
)
def test_a_value_at_its_limit_is_taken(name, value):
    params = SamplingParams(**{name: value})
    taken = getattr(params, name)
    expected = (value,) if name == "stop" and isinstance(value, str) else value
    assert taken == (tuple(expected) if isinstance(expected, list) else expected)


def test_every_field_is_tried_here_and_documented():
    names = set(SamplingParams.field_names())
    assert names >= set(BAD) == set(GOOD) | {"logit_bias", "structured_outputs"}
    penalties = {"presence_penalty", "frequency_penalty", "repetition_penalty"}
    assert names - set(BAD) == {"best_of"} | penalties  # these have tests of their own
    assert all(field.metadata["doc"] for field in dataclasses.fields(SamplingParams))


def test_the_defaults_are_the_usual_ones():
    params = SamplingParams()
    assert (params.n, params.temperature, params.top_p, params.max_tokens) == (1, 1.0, 1.0, 16)
    assert (params.top_k, params.min_p, params.seed) == (0, 0.0, None)
    assert params.stop == params.stop_token_ids == ()
    assert not params.ignore_eos and not params.include_stop_str_in_output
    assert params.skip_special_tokens


def test_a_bias_may_come_as_json_writes_it():
    want = ((5, -100.0), (2**31 - 1, 0.5))
    for given in ({5: -100, 2**31 - 1: 0.5}, {"5": -100, "2147483647": 0.5}, [[5, -100], want[1]]):
        assert SamplingParams(logit_bias=given).logit_bias == want
    assert SamplingParams(logit_bias={}).biases == ()


def test_a_form_is_checked_and_kept_as_a_value():
    schema = {"type": "object"}
    params = SamplingParams(structured_outputs={"json": schema})
    schema["type"] = "array"
    assert params == SamplingParams(structured_outputs={"json": '{"type":   "object"}'})
    assert hash(params) and params.form == StructuredOutputs(json={"type": "object"})
    again = SamplingParams(**dataclasses.asdict(params))
    assert again == params


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({}, "structured_outputs"),
        ({"regex": "a", "choice": ["a"]}, "structured_outputs"),
        ({"regex": "a" * 65537}, "structured_outputs.regex"),
        ({"grammar": ""}, "structured_outputs.grammar"),
        ({"json": "{"}, "structured_outputs.json"),
        ({"json": [1]}, "structured_outputs.json"),
        ({"json": {"a": object()}}, "structured_outputs.json"),
        ({"json": {"enum": ["x" * 70000]}}, "structured_outputs.json"),
        ({"json_object": False}, "structured_outputs.json_object"),
        ({"choice": []}, "structured_outputs.choice"),
        ({"choice": ["a"] * 1025}, "structured_outputs.choice"),
        ({"choice": ["a", 1]}, "structured_outputs.choice"),
    ],
)
def test_a_form_that_is_none_is_refused_by_name(fields, param):
    with pytest.raises(RequestError) as refused:
        StructuredOutputs(**fields)
    assert refused.value.param == param
    assert len(str(refused.value)) < 500


def test_min_tokens_stay_within_max_tokens():
    with pytest.raises(RequestError, match="min_tokens must be at most max_tokens=3, got 4"):
        SamplingParams(min_tokens=4, max_tokens=3)
    assert SamplingParams(min_tokens=400, max_tokens=None).min_tokens == 400


def test_params_are_a_value():
    params = SamplingParams(stop=["a"], stop_token_ids=[1])
    assert params == SamplingParams(stop=("a",), stop_token_ids=(1,))
    assert hash(params) == hash(SamplingParams(stop="a", stop_token_ids=[1]))
    with pytest.raises(dataclasses.FrozenInstanceError):
        params.n = 2
    with pytest.raises(RequestError):
        dataclasses.replace(params, n=0)
    with pytest.raises(TypeError):
        SamplingParams(2)


def test_a_list_given_in_is_not_kept():
    stop, ids = ["a"], [1]
    params = SamplingParams(stop=stop, stop_token_ids=ids)
    stop.append("b")
    ids.append(2)
    assert (params.stop, params.stop_token_ids) == (("a",), (1,))


class Counted(list):
    """A list that counts how many of its items were looked at."""

    looked_at = 0

    def __iter__(self):
        for item in super().__iter__():
            self.looked_at += 1
            yield item


@pytest.mark.parametrize(
    ("name", "items"),
    [
        ("stop", ["x"] * 500_000),
        ("stop", ["x"] * 65),
        ("stop_token_ids", [1] * 1_000_000),
        ("stop_token_ids", [1] * 257),
        ("stop", ["x" * 2_000_000, "y"]),
        ("logit_bias", [(1, 1.0)] * 1_000_000),
        ("bad_words", ["x"] * 500_000),
        ("allowed_token_ids", [1] * 1_000_000),
    ],
    ids=[
        "500,000 strings",
        "65 strings",
        "a million ids",
        "257 ids",
        "a long string",
        "a million biases",
        "500,000 words",
        "a million allowed ids",
    ],
)
def test_a62_a_huge_list_is_refused_before_any_work_on_its_items(name, items):
    items = Counted(items)
    tracemalloc.start()
    before = time.process_time()
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: items})
    assert time.process_time() - before < 0.1
    assert tracemalloc.get_traced_memory()[1] < 100_000
    tracemalloc.stop()
    assert refused.value.param == name
    assert items.looked_at <= 1
    assert len(str(refused.value)) < 200


def test_an_unknown_field_is_an_error_of_the_caller():
    with pytest.raises(TypeError, match="no_such_field"):
        SamplingParams(no_such_field=1)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("temperature", "x" * 1_000_000),
        ("n", [0] * 300_000),
        ("stop", {"x" * 1000: "y" * 1_000_000}),
        ("stop", ["a", ["b"] * 300_000]),
        ("ignore_eos", "x" * 1_000_000),
    ],
    ids=["string", "list", "dict", "list in a list", "string for a truth value"],
)
def test_a62_a_huge_value_of_the_wrong_kind_makes_no_huge_message(name, value):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
    assert len(str(refused.value)) < 1000


@pytest.mark.parametrize("name", ["n", "temperature", "top_k", "top_p", "seed", "max_tokens"])
@pytest.mark.parametrize("value", [10**400, -(10**400), 10**5000], ids=["large", "low", "huge"])
def test_an_integer_beyond_every_float_is_refused_like_any_other(name, value):
    with pytest.raises(RequestError) as refused:
        SamplingParams(**{name: value})
    assert refused.value.param == name
