"""Back ends by name."""

import dataclasses

import pytest

from pallas_kernels import (
    ReferenceBackend,
    XlaBackend,
    backend_names,
    choose_backend,
    get_backend,
    register_backend,
    registry,
)


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))


def test_the_built_in_back_ends():
    assert backend_names() == ("reference", "xla")
    assert get_backend("xla") == XlaBackend()
    assert get_backend("reference") == ReferenceBackend()


def test_a_back_end_is_a_hashable_value():
    """So that it can be a static argument of a jitted function."""
    assert hash(get_backend("xla")) == hash(XlaBackend())
    assert get_backend("xla") != get_backend("reference")


def test_an_unknown_name_is_told_the_known_ones():
    for call in (lambda: get_backend("cuda"), lambda: choose_backend("cuda", "NVIDIA H200")):
        with pytest.raises(ValueError, match="back end 'cuda'; known: reference, xla"):
            call()


@pytest.mark.parametrize("device_kind", ["cpu", "TPU v5e", "NVIDIA H200"])
def test_auto_picks_xla_and_says_why(device_kind):
    backend, reason = choose_backend("auto", device_kind)
    assert backend == get_backend("xla")
    assert device_kind in reason


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_a_name_is_taken_at_its_word(name):
    assert choose_backend(name, "cpu") == (get_backend(name), f"{name}: chosen by name")


@pytest.mark.usefixtures("own_registry")
def test_a_new_back_end_is_known_after_it_is_registered():
    mine = dataclasses.replace(ReferenceBackend(), name="mine")
    assert register_backend(mine) == mine
    assert get_backend("mine") is mine
    assert backend_names() == ("mine", "reference", "xla")
    assert choose_backend("mine", "cpu")[0] is mine


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("name", ["xla", "auto"])
def test_a_taken_name_is_refused(name):
    with pytest.raises(ValueError, match=f"name '{name}' is taken"):
        register_backend(dataclasses.replace(ReferenceBackend(), name=name))
    assert get_backend("xla") == XlaBackend()
