"""One model over several devices: the same tokens, a part of the memory, the collectives it needs.

The devices are simulated, in one process for all of it (`tests/parallel_runs.py`).
"""

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from paged_jax import ConfigError, Engine, EngineConfig
from paged_jax.attention import LayerSpec
from paged_jax.kv_cache import kv_spec
from paged_jax.model_runner import ModelRunner, Program
from paged_jax.models import describe_model, load_model
from paged_jax.plan import make_plan
from paged_jax.progress import SilentProgress
from paged_jax.sharding import make_mesh
from paged_jax.tensor_parallel import num_kv_shares
from pallas_kernels import TpuBackend, aot
from tests.parallel_runs import GOLDENS, collectives
from tests.test_lora import EVERY, write_adapter
from tests.tiny_models import TINY_LLAMA, write_tiny_llama

MIB = 2**20

# Built of unlike parts. The others differ from one of them in what no device sees, or in one part
# that another one here has.
UNLIKE = ("gemma2", "gpt-oss", "gpt2", "llama", "olmo2", "qwen3")
ALIKE = sorted({path.name for path in GOLDENS.iterdir()} - {*UNLIKE})
# The processes of this machine may be stopped for a while; XLA would take that for a deadlock.
XLA_FLAGS = (
    "--xla_force_host_platform_device_count=8 "
    "--xla_cpu_collective_call_terminate_timeout_seconds=3600"
)


def run_in_parallel(output: Path, *arguments: str | Path) -> dict[str, Any]:
    run = subprocess.run(
        [sys.executable, "-m", "tests.parallel_runs", output, *arguments],
        env={**os.environ, "XLA_FLAGS": XLA_FLAGS},
        cwd=Path(__file__).parent.parent,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 0, run.stderr[-4000:]
    return json.loads(output.read_text())


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("parallel")
    write_tiny_llama(folder / "llama", num_hidden_layers=1)  # a second would compile as the first
    llama = load_model(folder / "llama", dtype="float32")
    write_adapter(folder / "adapters" / "one", llama, rank=2, targets=EVERY, seed=1)
    everything = ("--everything", folder / "llama", folder / "adapters")
    return run_in_parallel(folder / "runs.json", *UNLIKE, *everything)


@pytest.fixture(scope="module")
def swept_runs(tmp_path_factory) -> dict[str, Any]:
    return run_in_parallel(tmp_path_factory.mktemp("parallel") / "runs.json", *ALIKE)


@pytest.fixture(params=[*UNLIKE, *(pytest.param(n, marks=pytest.mark.sweep) for n in ALIKE)])
def name(request) -> str:
    return request.param


@pytest.fixture
def run_of_two(request, name) -> dict[str, Any]:
    """Of a family on two devices."""
    return request.getfixturevalue("swept_runs" if name in ALIKE else "runs")[name]


def greedy_tokens(name: str) -> list[int]:
    return json.loads((GOLDENS / name / "golden.json").read_text())["greedy_token_ids"]


def num_layers(name: str) -> int:
    config = json.loads((GOLDENS / name / "config.json").read_text())
    return config.get("num_hidden_layers") or config["n_layer"]


def test_two_devices_give_the_goldens_tokens_also_after_preemption(run_of_two, name):
    assert run_of_two["preemptions"] > 0
    assert run_of_two["tokens"] == greedy_tokens(name)


def test_a_layer_costs_two_all_reduces_and_nothing_is_gathered(run_of_two, name):
    """One behind attention and one behind the MLP; the embedding has one. No device ever sees
    another one's part of the pool or of the weights."""
    # OLMo 2 norms queries and keys over all heads: XLA makes one of the two sums.
    a_layer = 3 if name == "olmo2" else 2
    assert run_of_two["step"] == {"all-reduce": 1 + a_layer * num_layers(name)}


def test_four_devices_share_two_kv_heads(runs):
    assert runs["llama on 4"]["tokens"] == greedy_tokens("llama")
    assert runs["llama on 4"]["preemptions"] > 0


def test_each_device_holds_its_part(runs):
    params = jax.tree.leaves(load_model(GOLDENS / "llama", dtype="float32").params)
    weights = sum(leaf.nbytes for leaf in params)
    layers, blocks, block_size, kv_heads, head_size = 3, 10, 8, 2, 8
    pool = 2 * 4 * layers * blocks * block_size * kv_heads * head_size
    two, four = runs["llama"], runs["llama on 4"]
    assert two["kv_cache_bytes"] == four["kv_cache_bytes"] == pool / 2
    assert weights / 2 < two["weight_bytes"] < 0.51 * weights  # norms are whole
    # Keys and values are cut in two parts only.
    assert weights / 4 < four["weight_bytes"] < 0.29 * weights


def test_everything_else_is_as_on_one_device(runs):
    """Shared and copied blocks, swaps, draws, log-probabilities, adapters over int8 weights, other
    weights, a night's sleep: the same programs, the same tokens, nothing compiled late."""
    one, two = runs["everything on 1"], runs["everything on 2"]
    assert two["tokens"] == one["tokens"]
    assert two["programs"] == one["programs"]
    np.testing.assert_allclose(two["logprobs"], one["logprobs"], atol=1e-4)
    np.testing.assert_allclose(two["scores"], one["scores"], atol=1e-4)
    assert two["late_compiles"] == 0
    assert min(two[count] for count in ("num_swap_ins", "num_copies", "prefix_hit_tokens")) > 0


def test_a80_the_pools_keep_their_sharding_and_nothing_compiles(runs):
    """Before warm-up, after it, after a run of more than ten steps, and after a sleep."""
    two = runs["everything on 2"]
    before, *after = two["pool_shardings"]
    assert before and all("P(None, 'kv_heads'" in sharding for sharding in before)
    assert after == [before] * 3
    assert two["late_compiles"] == 0


def test_logits_are_never_gathered(runs):
    """Each device keeps its part of the vocabulary; what it sends is a few numbers a row."""
    rows, vocabulary = 2, 160
    assert 0 < runs["everything on 2"]["sampler"] < rows * vocabulary / 4


def test_a_users_module_is_told_how_to_cut_and_then_runs(runs):
    own = runs["own module"]
    assert "tensor_parallel_size=2: this model does not say how its weights" in own["refusal"]
    assert "nnx.Param(value, split=paged_jax.sharding.Split(axis))" in own["refusal"]
    assert own["two"] == own["one"]


def test_fewer_devices_are_an_error():
    with pytest.raises(ConfigError, match=r"tensor_parallel_size=2 wants .* JAX finds 1 \(cpu\)"):
        Engine.from_pretrained(
            str(GOLDENS / "llama"),
            skip_tokenizer_init=True,
            tensor_parallel_size=2,
            progress=SilentProgress(),
        )


def layer(num_heads: int, num_kv_heads: int) -> LayerSpec:
    return LayerSpec(num_heads, num_kv_heads, 8, None, jnp.dtype("float32"))


@pytest.mark.parametrize(
    ("heads", "size", "shares"),
    [((8, 8), 4, 4), ((8, 2), 2, 2), ((8, 2), 4, 2), ((8, 1), 8, 1), ((9, 3), 9, 3)],
)
def test_kv_heads_are_cut_as_far_as_they_go(heads, size, shares):
    assert num_kv_shares([layer(*heads)] * 2, size) == shares


@pytest.mark.parametrize(
    ("layers", "size", "message"),
    [
        ([(9, 3)], 2, r"num_heads=9 with num_kv_heads=3: .*takes 1, 3, 9$"),
        ([(12, 4)], 6, r"num_heads=12 with num_kv_heads=4: .*takes 1, 2, 4, 12$"),
        ([(8, 4), (8, 2)], 4, r"num_kv_heads=2 and num_heads=8 with .*takes 1, 2$"),
    ],
)
def test_heads_that_cannot_be_dealt_out_are_an_error(layers, size, message):
    """With 12 and 4 heads, two of six devices would need the KV heads of two others."""
    with pytest.raises(ConfigError, match=rf"tensor_parallel_size={size} does not fit .*{message}"):
        num_kv_shares([layer(*heads) for heads in layers], size)


@pytest.mark.slow
def test_the_engines_own_step_compiles_for_four_tpu_chips(tmp_path):
    """Of shapes alone, with the kernels: a quarter of the weights and of the pool on each chip."""
    if reason := aot.why_no_tpu_compiler():
        if "not installed" in reason:
            pytest.fail(reason)
        pytest.skip(f"needs a TPU compiler: {reason}")
    heads = {"num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128}
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "vocab_size": 4096}
    (tmp_path / "config.json").write_text(json.dumps({**TINY_LLAMA, **heads, **sizes}))
    model = describe_model(tmp_path, dtype="bfloat16")
    devices = aot.tpu_devices("v5e")
    mesh = make_mesh(devices)
    config = EngineConfig(model="m", max_num_seqs=8, max_num_batched_tokens=64, max_model_len=512)
    plan = make_plan(model, config, mesh)
    (group,) = plan.groups
    spec = kv_spec(group, num_blocks=1024, block_size=16, dtype=group.dtype)
    assert spec.num_kv_heads == 2
    runner = ModelRunner(
        model,
        mesh=mesh,
        backend=TpuBackend().for_device(devices[0].device_kind),
        layer_slots=plan.layer_slots,
        specs=[spec],
        buckets=plan.buckets,
        table_width=plan.table_width,
        max_num_seqs=8,
        max_num_chunks=2,
    )
    with jax.default_device(devices[0]):  # lowering asks it what it compiles for
        step = runner.compile(Program("backbone", (8, 64)))
    weights = sum(leaf.size * 2 for leaf in jax.tree.leaves(model.params))
    assert weights / 4 < runner.num_weight_bytes < 1.01 * weights / 4  # norms are whole
    assert runner.num_pool_bytes == 2 * 2 * 1024 * 16 * 2 * 128 * 2  # of two layers
    assert collectives(step) == {"all-reduce": 1 + 2 * 2}
    memory = step.memory_analysis()
    assert memory.alias_size_in_bytes == runner.num_pool_bytes
    inputs = memory.argument_size_in_bytes - runner.num_pool_bytes - runner.num_weight_bytes
    assert inputs < MIB and memory.temp_size_in_bytes < 16 * MIB
