"""Back ends by name."""

import dataclasses

import jax.numpy as jnp
import pytest

from pallas_kernels import (
    KVSpec,
    ReferenceBackend,
    XlaBackend,
    backend_names,
    choose_backend,
    get_backend,
    register_backend,
    registry,
)
from pallas_kernels.pool import QUANTIZED_DTYPES

SPEC = KVSpec(2, 8, 16, 2, 64, jnp.dtype("float32"))


@pytest.fixture
def own_registry(monkeypatch):
    monkeypatch.setattr(registry, "_backends", dict(registry._backends))


def test_the_built_in_back_ends():
    assert backend_names() == ("gpu", "reference", "tpu", "xla")
    assert get_backend("xla") == XlaBackend()
    assert get_backend("reference") == ReferenceBackend()


def test_a_back_end_is_a_hashable_value():
    """So that it can be a static argument of a jitted function."""
    assert hash(get_backend("xla")) == hash(XlaBackend())
    assert get_backend("xla") != get_backend("reference")


def test_an_unknown_name_is_told_the_known_ones():
    for call in (lambda: get_backend("cuda"), lambda: choose_backend("cuda", "NVIDIA H200")):
        with pytest.raises(ValueError, match="back end 'cuda'; known: gpu, reference, tpu, xla"):
            call()


@pytest.mark.parametrize("device_kind", ["cpu", "TPU v3", "NVIDIA A100-SXM4-80GB", "NVIDIA B200"])
def test_auto_picks_xla_and_says_why(device_kind):
    backend, reason = choose_backend("auto", device_kind)
    assert backend == get_backend("xla")
    assert device_kind in reason


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", *QUANTIZED_DTYPES])
def test_auto_takes_the_hopper_kernel_for_what_the_matrix_unit_multiplies_or_can_be_widened(dtype):
    spec = SPEC._replace(dtype=jnp.dtype(dtype))
    backend, reason = choose_backend("auto", "NVIDIA H200", [spec])
    assert backend == get_backend("gpu")
    assert reason == "gpu: auto, made for 'NVIDIA H200'"
    assert choose_backend("auto", "NVIDIA L4", [spec])[0] == get_backend("xla")


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"dtype": jnp.dtype("float32")}, "dtype float32: the matrix unit multiplies"),
        ({"head_size": 40}, "head_size 40: the kernel takes multiples of 16 up to 256"),
        ({"dtype": jnp.dtype("int8"), "block_size": 12}, "block_size 12: the kernel takes 8"),
    ],
)
def test_what_the_hopper_kernel_cannot_take_goes_to_xla_or_is_refused_by_name(change, why):
    spec = SPEC._replace(**{"dtype": jnp.dtype("bfloat16"), **change})
    backend, reason = choose_backend("auto", "NVIDIA H200", [spec])
    assert backend == get_backend("xla") and f"gpu cannot: {why}" in reason
    with pytest.raises(ValueError, match=f"attention back end gpu cannot take {why}"):
        choose_backend("gpu", "NVIDIA H200")[0].layout(spec)


@pytest.mark.parametrize("name", ["reference", "xla"])
def test_a_name_is_taken_at_its_word(name):
    assert choose_backend(name, "cpu") == (get_backend(name), f"{name}: chosen by name")


@pytest.mark.usefixtures("own_registry")
def test_a_new_back_end_is_known_after_it_is_registered():
    mine = dataclasses.replace(ReferenceBackend(), name="mine")
    assert register_backend(mine) == mine
    assert get_backend("mine") is mine
    assert backend_names() == ("gpu", "mine", "reference", "tpu", "xla")
    assert choose_backend("mine", "cpu")[0] is mine


@pytest.mark.usefixtures("own_registry")
@pytest.mark.parametrize("name", ["xla", "auto"])
def test_a_taken_name_is_refused(name):
    with pytest.raises(ValueError, match=f"name '{name}' is taken"):
        register_backend(dataclasses.replace(ReferenceBackend(), name=name))
    assert get_backend("xla") == XlaBackend()


@dataclasses.dataclass(frozen=True)
class OfAFile:
    """A back end that somebody else wrote: all of `ReferenceBackend`, for one kind of device."""

    name: str = "theirs"
    device_kind: str = "unknown"

    def __getattr__(self, attribute):
        return getattr(ReferenceBackend(), attribute)

    def is_made_for(self, device_kind):
        return device_kind == "Abacus 3000"

    def for_device(self, device_kind):
        return dataclasses.replace(self, device_kind=device_kind)

    def refusal(self, spec):
        return None if spec.head_size % 64 == 0 else f"head_size {spec.head_size} is not whole"


@pytest.mark.usefixtures("own_registry")
def test_auto_takes_the_one_that_is_made_for_the_device():
    theirs = register_backend(OfAFile())
    backend, reason = choose_backend("auto", "Abacus 3000", [SPEC])
    assert backend == theirs.for_device("Abacus 3000") != theirs
    assert reason == "theirs: auto, made for 'Abacus 3000'"
    assert choose_backend("auto", "Abacus 2000", [SPEC])[0] == XlaBackend()
    by_name, reason = choose_backend("theirs", "Abacus 2000", [SPEC._replace(head_size=80)])
    assert (by_name, reason) == (theirs.for_device("Abacus 2000"), "theirs: chosen by name")


@pytest.mark.usefixtures("own_registry")
def test_auto_takes_xla_for_a_pool_that_is_refused_and_says_which():
    register_backend(OfAFile())
    specs = [SPEC, SPEC._replace(head_size=80)]
    backend, reason = choose_backend("auto", "Abacus 3000", specs)
    assert backend == XlaBackend()
    assert reason == "xla: auto, theirs cannot: head_size 80 is not whole"
