"""One start, from nothing to the first token, in the process it is run in; prints its times.

    python -m paged_jax.bench.startup_probe CONFIG STARTED_AT

CONFIG is an EngineConfig as JSON, STARTED_AT the monotonic clock when the process was started.
"""

import json
import sys
import time

BEGAN = time.monotonic()  # before anything heavy is imported


def main(config_json: str, started_at: str) -> int:
    times = {"interpreter_s": BEGAN - float(started_at)}
    last = BEGAN

    def lap(name: str) -> None:
        nonlocal last
        now = time.monotonic()
        times[name] = now - last
        last = now

    from paged_jax.bench.drive import greedy
    from paged_jax.bench.model_bed import load_bed
    from paged_jax.config import EngineConfig
    from paged_jax.engine import Engine
    from paged_jax.progress import SilentProgress
    from paged_jax.sharding import choose_device

    lap("import_s")
    config = EngineConfig(**json.loads(config_json))
    choose_device(config.device)
    lap("device_s")
    bed = load_bed(config, SilentProgress())
    lap("weights_s")
    if not config.skip_tokenizer_init:
        bed.encode("Hello")
    lap("tokenizer_s")
    engine = Engine(bed.model, config, progress=SilentProgress())
    engine.warm_up()
    lap("engine_s")
    engine.add_request("first", [1, 2, 3, 4], greedy(1))
    while not any(update.token_id is not None for update in engine.step()):
        pass
    lap("first_token_s")
    stats = engine.stats()
    times |= {"total_s": last - float(started_at), "compile_s": stats.compile_s}
    print(json.dumps({**times, "compiles": stats.compiles}))
    return 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
