"""What a step costs when one row of sixteen wants log-probabilities, penalties and a grammar.

    .venv/bin/python scripts/option_cost.py [MODEL]

Plain and mixed batches take turns, so that a change of the machine's mood meets both; a round's
figure is the median of its decode steps. The machine should be quiet.
"""

import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from paged_jax import Engine, EngineConfig, SamplingParams

ROWS, STEPS, ROUNDS = 16, 40, 7
PLAIN = SamplingParams(temperature=0.0, max_tokens=STEPS + 8, ignore_eos=True)
ASKING = SamplingParams(
    temperature=0.0,
    max_tokens=STEPS + 8,
    logprobs=5,
    frequency_penalty=0.5,
    repetition_penalty=1.1,
    structured_outputs={"regex": "([a-z]{1,9} ){400}"},
)


def step_s(engine: Engine, params: list[SamplingParams]) -> float:
    """Median seconds of a decode step with a row for each of `params`."""
    for i, one in enumerate(params):
        engine.add_request(f"r{i}", [100 + i, 200, 300, 400], one)
    for _ in range(5):
        engine.step()  # prefill, and what comes with the first tokens
    seconds = []
    for _ in range(STEPS):
        began = time.perf_counter()
        engine.step()
        seconds.append(time.perf_counter() - began)
    for i in range(len(params)):
        engine.abort(f"r{i}")
    while engine.has_unfinished:
        engine.step()
    return statistics.median(seconds)


def main() -> int:
    model = sys.argv[1] if len(sys.argv) > 1 else "smollm2"
    engine = Engine.from_pretrained(
        EngineConfig(model=model, max_model_len=512, max_num_seqs=ROWS, warmup="full")
    )
    engine.warm_up()
    plain, mixed = [PLAIN] * ROWS, [ASKING, *[PLAIN] * (ROWS - 1)]
    step_s(engine, mixed)
    rounds = [(step_s(engine, plain), step_s(engine, mixed)) for _ in range(ROUNDS)]
    ratios = sorted(b / a for a, b in rounds)
    for name, seconds in zip(("plain", "mixed"), zip(*rounds, strict=True), strict=True):
        print(f"{name}: {1e3 * statistics.median(seconds):.2f} ms a step")
    print(
        f"ratio: {statistics.median(ratios):.3f} (of {ROUNDS} rounds {ratios[0]:.3f} to "
        f"{ratios[-1]:.3f})"
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
