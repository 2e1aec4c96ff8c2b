"""Models over simulated devices. Started by test_tensor_parallel.py in a process of its own, since
JAX learns the number of devices when it starts; writes what it saw as JSON.

    python -m tests.parallel_runs OUTPUT [FAMILY ...] [--everything FOLDER_OF_A_LLAMA ITS_ADAPTERS]
"""

import argparse
import collections
import json
import math
import re
from pathlib import Path
from typing import Any

import jax

from paged_jax import ConfigError, Engine, SamplingParams
from paged_jax.model_runner import Program
from paged_jax.models import load_model
from paged_jax.progress import SilentProgress
from paged_jax.sharding import Split
from tests import nnx_models
from tests.engine_runs import Run, assert_idle

GOLDENS = Path(__file__).parent / "data" / "families"
BLOCK, CHUNK = 8, 8
COLLECTIVES = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
# What the tests of one device use, so that a sequence is preempted.
NUM_BLOCKS = {"mistral-window": 6}


def start(directory: Path, size: int, **options: Any) -> Engine:
    config = {
        "skip_tokenizer_init": True,
        "max_num_seqs": 2,
        "max_num_batched_tokens": CHUNK,
        "max_model_len": 80,
        "block_size": BLOCK,
        "num_blocks": NUM_BLOCKS.get(directory.name, 10),
        "tensor_parallel_size": size,
    }
    return Engine.from_pretrained(str(directory), progress=SilentProgress(), **config | options)


def collectives(program: jax.stages.Compiled) -> dict[str, int]:
    """How many of each kind a compiled program has."""
    found = re.findall(rf"= [^=]*? ({COLLECTIVES})(?:-start)?\(", program.as_text())
    return dict(collections.Counter(found))


def largest_collective(program: jax.stages.Compiled) -> int:
    """Numbers in the largest result of one."""
    text = program.as_text()
    shapes = re.findall(rf"= \w+\[([\d,]*)\][^=]*? (?:{COLLECTIVES})(?:-start)?\(", text)
    return max((math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes), default=0)


def family(directory: Path, size: int) -> dict[str, Any]:
    """Greedy tokens beside a neighbour for which the blocks do not suffice."""
    golden = json.loads((directory / "golden.json").read_text())
    prompt, count = golden["prompt_token_ids"], len(golden["greedy_token_ids"])
    params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    # The plainest back end compiles in half the time.
    engine = start(directory, size, attention_backend="reference", warmup="none")
    run = Run(engine)
    run.add("one", prompt, params)
    run.add("neighbour", prompt[::-1], params)
    run.drain()
    stats = engine.stats()
    assert_idle(engine)
    engine.close()
    return {
        "tokens": run.tokens("one"),
        "preemptions": stats.preemptions,
        "step": collectives(engine.runner.compile(Program("backbone", (2, CHUNK)))),
        "weight_bytes": stats.weight_bytes,
        "kv_cache_bytes": stats.kv_cache_bytes,
    }


def pool_shardings(engine: Engine) -> list[str]:
    """Of every array of the KV cache."""
    arrays = (array for pool in engine.runner._state.pools for array in pool.arrays)
    return [repr(array.sharding) for array in arrays]


def everything(directory: Path, adapters: Path, size: int, **options: Any) -> dict[str, Any]:
    """Every program there is: samples that share blocks, swaps, penalties, log-probabilities,
    adapters over quantised weights, then other weights, and a night's sleep."""
    swap = {"preemption_mode": "swap", "swap_space": 1e-3, "num_blocks": 9}
    lora = {"enable_lora": True, "max_loras": 1, "max_lora_rank": 2, "lora_dir": str(adapters)}
    engine = start(directory, size, quantization="int8", **swap, **lora, **options)
    shardings = [pool_shardings(engine)]
    if engine.config.warmup == "full":
        engine.warm_up()
    shardings.append(pool_shardings(engine))
    run = Run(engine)
    prompt = list(range(20, 43))
    greedy = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=3)
    drawn = SamplingParams(
        n=2, seed=5, top_k=40, top_p=0.9, presence_penalty=0.5, max_tokens=24, ignore_eos=True
    )
    run.add("drawn", prompt, drawn)
    run.drain()
    shardings.append(pool_shardings(engine))
    long = SamplingParams(temperature=0.0, max_tokens=36, ignore_eos=True)
    run.add("swapped", prompt, long)
    run.add("its neighbour", prompt[::-1], long)
    run.drain()
    engine.add_request("adapted", prompt, greedy, adapter="one")
    run.drain()
    scores = engine.score([prompt])[0].tolist()
    params = load_model(directory, dtype="float32").params
    engine.update_params(jax.tree.map(lambda x: 0.9 * x, params))
    run.add("updated", prompt, greedy)
    run.drain()
    engine.sleep(weights="host")
    engine.wake()
    run.add("rested", prompt, greedy)
    run.drain()
    shardings.append(pool_shardings(engine))
    stats = engine.stats()
    assert_idle(engine)
    engine.close()
    return {
        "sampler": largest_collective(engine.runner.compile(Program("sample", (2,)))),
        "tokens": {f"{name} {i}": sample.token_ids for (name, i), sample in run.samples.items()},
        "logprobs": [entry.logprob for entry in run.samples["adapted", 0].logprobs],
        "scores": scores,
        "programs": sorted(map(str, engine.runner.programs())),
        "pool_shardings": shardings,
        "late_compiles": stats.late_compiles,
        "num_swap_ins": stats.num_swap_ins,
        "num_copies": stats.num_copies,
        "prefix_hit_tokens": stats.prefix_hit_tokens,
    }


def own_module() -> dict[str, Any]:
    """A user's module: refused while it cuts nothing, then with some of its parameters cut."""
    module = nnx_models.Decoder([(None, 2)])
    options = {"max_num_seqs": 2, "max_num_batched_tokens": CHUNK, "max_model_len": 40}

    def tokens(size: int) -> tuple[int, ...]:
        engine = Engine.from_nnx(
            module, tensor_parallel_size=size, attention_backend="reference", **options
        )
        run = Run(engine)
        run.add("r", list(range(20)), SamplingParams(temperature=0.0, max_tokens=9))
        run.drain()
        engine.close()
        return run.tokens("r")

    one, refusal = tokens(1), ""
    try:
        tokens(2)
    except ConfigError as error:
        refusal = str(error)
    (layer,) = module.layers
    for param, axis in ((module.tokens, 0), (layer.out, 0), (layer.up, 1), (layer.down, 0)):
        param.set_metadata(split=Split(axis))
    return {"refusal": refusal, "one": one, "two": tokens(2)}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("output", type=Path)
    parser.add_argument("families", nargs="*")
    parser.add_argument("--everything", nargs=2, type=Path)
    asked = parser.parse_args()
    jax.config.update("jax_disable_most_optimizations", True)
    results: dict[str, Any] = {name: family(GOLDENS / name, 2) for name in asked.families}
    if asked.everything:
        results["llama on 4"] = family(GOLDENS / "llama", 4)
        plain = {"attention_backend": "reference", "warmup": "none"}
        results["everything on 1"] = everything(*asked.everything, 1, **plain)
        results["everything on 2"] = everything(*asked.everything, 2, warmup="full")
        results["own module"] = own_module()
    asked.output.write_text(json.dumps(results))


if __name__ == "__main__":
    main()
