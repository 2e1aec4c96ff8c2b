"""The public surface of paged_jax: a change here is a change that users see."""

import pytest

import paged_jax

PUBLIC = [
    "LLM",
    "AsyncEngine",
    "Beam",
    "BeamSearchOutput",
    "BeamSearchParams",
    "CompletionOutput",
    "ConfigError",
    "Engine",
    "EngineConfig",
    "EngineDeadError",
    "EngineStats",
    "LateCompileError",
    "ModelLoadError",
    "ModelNotFoundError",
    "PagedJaxError",
    "RequestError",
    "RequestOutput",
    "SamplingParams",
    "StructuredOutputs",
    "TokenLogprob",
    "__version__",
]


def test_the_public_names_are_these():
    assert sorted(paged_jax.__all__) == sorted(PUBLIC)


@pytest.mark.parametrize("name", PUBLIC)
def test_a_public_name_is_there(name):
    assert getattr(paged_jax, name) is not None
    assert name in dir(paged_jax)


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="no attribute 'Lllm'"):
        paged_jax.Lllm  # noqa: B018
