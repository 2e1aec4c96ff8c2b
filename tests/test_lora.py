"""LoRA adapters: each request's own in one batch, against weights that were merged by hand."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from safetensors.numpy import save_file

from paged_jax import ConfigError, Engine, ModelLoadError, RequestError, SamplingParams
from paged_jax.models import ServedModel, from_nnx, load_model
from paged_jax.progress import SilentProgress
from tests import nnx_models
from tests.dense_decoding import DenseDecoder
from tests.engine_runs import Run, assert_idle
from tests.tiny_models import write_tiny_llama

COUNT = 8
PROMPT = list(range(20, 41))
GREEDY = SamplingParams(temperature=0.0, max_tokens=COUNT, ignore_eos=True, logprobs=5)
PREFIX = "base_model.model.model.layers"
ATTENTION = ("self_attn.q_proj", "self_attn.v_proj")
EVERY = (*ATTENTION, "self_attn.k_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")


def write_adapter(
    directory: Path,
    model: ServedModel,
    *,
    rank: int,
    targets: tuple[str, ...],
    seed: int,
    tensors: dict[str, Any] | None = None,
    **config: Any,
) -> Path:
    """A PEFT folder with random matrices for these modules of every layer."""
    rng = np.random.default_rng(seed)
    written = {}
    for layer in range(len(model.params["layers"])):
        for target in targets:
            shape = matrix(model, layer, target).shape
            name = f"{PREFIX}.{layer}.{target}"
            down, up = rng.standard_normal((rank, shape[1])), rng.standard_normal((shape[0], rank))
            written[f"{name}.lora_A.weight"] = (0.3 * down).astype(np.float32)
            written[f"{name}.lora_B.weight"] = (0.3 * up).astype(np.float32)
    directory.mkdir(parents=True, exist_ok=True)
    save_file(written | (tensors or {}), directory / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 2 * rank, **config}
    (directory / "adapter_config.json").write_text(json.dumps(config))
    return directory


def matrix(model: ServedModel, layer: int, target: str) -> Any:
    part, name = target.split(".")
    return model.params["layers"][layer][part][name]["weight"]


def merged(model: ServedModel, directory: Path, scaling: dict[str, float]) -> ServedModel:
    """The model with an adapter added to its weights. `scaling` is by the module's last name."""
    from safetensors.numpy import load_file

    tensors = load_file(directory / "adapter_model.safetensors")
    params = jax.tree.map(lambda leaf: leaf, model.params)
    for name in tensors:
        if name.endswith(".lora_A.weight"):
            stem = name.removesuffix(".lora_A.weight")
            layer, part, last = stem.removeprefix(PREFIX + ".").split(".")
            place = params["layers"][int(layer)][part][last]
            factor = scaling.get(last, scaling[""])
            up, down = tensors[f"{stem}.lora_B.weight"], tensors[name]
            place["weight"] = place["weight"] + factor * (up @ down)
    return model._replace(params=params)


@pytest.fixture(scope="module")
def model(tmp_path_factory) -> ServedModel:
    directory = tmp_path_factory.mktemp("llama")
    write_tiny_llama(directory)
    return load_model(directory, dtype="float32")


@pytest.fixture(scope="module")
def root(tmp_path_factory, model) -> Path:
    root = tmp_path_factory.mktemp("adapters")
    write_adapter(root / "small", model, rank=2, targets=ATTENTION, seed=1)
    write_adapter(
        root / "large",
        model,
        rank=4,
        targets=EVERY,
        seed=2,
        use_rslora=True,
        lora_alpha=1,
        alpha_pattern={"mlp.down_proj": 2},
    )
    return root


@pytest.fixture(scope="module")
def decoders(model, root) -> dict[str, DenseDecoder]:
    models = {
        "base": model,
        "small": merged(model, root / "small", {"": 2.0}),
        "large": merged(model, root / "large", {"": 0.5, "down_proj": 1.0}),
    }
    return {name: DenseDecoder(served, 48) for name, served in models.items()}


def make(model: ServedModel, **config: Any) -> Engine:
    sizes = {
        "max_model_len": 48,
        "max_num_seqs": 4,
        "max_num_batched_tokens": 16,
        "block_size": 8,
        "num_blocks": 64,
        "warmup": "none",
    }
    return Engine(model, name="tiny", progress=SilentProgress(), **(sizes | config))


@pytest.fixture(scope="module")
def shared(model, root) -> Iterator[Engine]:
    engine = make(model, enable_lora=True, max_loras=3, max_lora_rank=4, lora_dir=str(root))
    yield engine
    engine.close()


@pytest.fixture
def engine(shared) -> Iterator[Engine]:
    yield shared
    for name in set(shared.adapter_names) - {"small", "large"}:
        shared.unload_adapter(name)
    assert_idle(shared)


def answer(engine: Engine, adapter: str | None, prompt=PROMPT) -> tuple[tuple[int, ...], int]:
    run = Run(engine)
    request = engine.add_request("r", prompt, GREEDY, adapter=adapter)
    run.drain()
    return run.tokens("r"), request.num_cached_tokens


def test_every_row_of_a_batch_has_its_own_adapter(engine, decoders):
    assert engine.adapter_names == ("large", "small")
    run = Run(engine)
    names = ("base", "small", "large", "small", "base", "large")
    for i, name in enumerate(names):
        adapter = None if name == "base" else name
        engine.add_request(f"{name} {i}", PROMPT[: 21 - i], GREEDY, adapter=adapter)
    run.drain()
    answers = set()
    for i, name in enumerate(names):
        want = decoders[name].greedy(PROMPT[: 21 - i], COUNT)
        assert want.is_clear
        assert run.tokens(f"{name} {i}") == want.token_ids
        answers.add(want.token_ids[:4])
    assert len(answers) >= 3


def test_rows_without_an_adapter_are_the_same_bit_for_bit(engine, model):
    def base_beside(engine: Engine, adapter: str | None) -> list:
        """What a request without an adapter gets beside another; nothing of it is cached."""
        run = Run(engine)
        for name, of in (("base", None), ("other", adapter)):
            salt = f"{name} {adapter}"
            engine.add_request(name, PROMPT, GREEDY, adapter=of, cache_salt=salt)
        run.drain()
        assert (run.tokens("other") != run.tokens("base")) is bool(adapter)
        return run.samples["base", 0].logprobs

    plain = make(model)
    want = base_beside(plain, None)
    plain.close()
    assert base_beside(engine, None) == base_beside(engine, "large") == want


def test_blocks_are_shared_within_an_adapter_only(engine):
    prompt = list(range(60, 85))
    assert [answer(engine, name, prompt)[1] for name in (None, "small", "large")] == [0, 0, 0]
    assert [answer(engine, name, prompt)[1] for name in (None, "small", "large")] == [24, 24, 24]


def test_an_adapter_is_loaded_at_run_time_without_compiling(engine, model, tmp_path):
    first = write_adapter(tmp_path / "one", model, rank=3, targets=ATTENTION, seed=5)
    other = write_adapter(tmp_path / "two", model, rank=1, targets=("mlp.up_proj",), seed=6)
    want = DenseDecoder(merged(model, other, {"": 2.0}), 48).greedy(PROMPT, COUNT)
    answer(engine, "small")
    engine.load_adapter("new", first)
    assert answer(engine, "new")[1] == 0
    compiles = engine.stats().compiles
    engine.unload_adapter("new")
    with pytest.raises(RequestError, match="no adapter 'new' is loaded; there are: large, small"):
        answer(engine, "new")
    engine.load_adapter("new", other)  # nothing of the first is left, in the slot or in the cache
    assert want.is_clear and answer(engine, "new") == (want.token_ids, 0)
    assert engine.stats().compiles == compiles


def test_adapters_outlive_new_weights_and_sleep(engine, model, decoders):
    engine.update_params(model.params)
    assert answer(engine, "small") == (decoders["small"].greedy(PROMPT, COUNT).token_ids, 0)
    for weights in ("host", "drop"):
        engine.sleep(weights=weights)
        if weights == "drop":
            engine.update_params(model.params)
        engine.wake()
        assert answer(engine, "large")[0] == decoders["large"].greedy(PROMPT, COUNT).token_ids
        assert answer(engine, None)[0] == decoders["base"].greedy(PROMPT, COUNT).token_ids


def test_an_adapter_in_use_stays(engine):
    run = Run(engine)
    engine.add_request("r", PROMPT, GREEDY, adapter="small")
    with pytest.raises(ConfigError, match="'small' is in use by 1 requests"):
        engine.unload_adapter("small")
    run.drain()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rank": 5}, "rank 5 of layers.0.self_attn.q_proj is more than max_lora_rank=4"),
        ({"targets": ("mlp.side_proj",)}, "has matrices for .*side_proj, where this model takes"),
        ({"use_dora": True}, "use_dora=True is not supported, only None or False"),
        ({"bias": "all"}, "bias='all' is not supported, only None or 'none'"),
        ({"peft_type": "IA3"}, "peft_type='IA3' is not supported, only 'LORA'"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=.'lm_head'. is not supported"),
        ({"lora_alpha": "high"}, "lora_alpha='high' must be a number"),
        (
            {"tensors": {f"{PREFIX}.0.mlp.up_proj.lora_A.weight": np.ones((2, 64), np.float32)}},
            "not every tensor is one of a pair .* mlp.up_proj|not every tensor is one of a pair",
        ),
        (
            {"tensors": {f"{PREFIX}.0.self_attn.q_proj.lora_A.weight": np.ones((2, 3), "f4")}},
            r"q_proj has lora_A \[2, 3\] and lora_B \[64, 2\], the model's matrix \[64, 64\] wants",
        ),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_by_name(wrong, message, engine, model, tmp_path):
    options = {"rank": 2, "targets": ATTENTION, "seed": 0} | wrong
    if wrong.get("targets"):
        options["targets"] = ATTENTION
    directory = write_adapter(tmp_path / "bad", model, **options)
    if wrong.get("targets"):
        from safetensors.numpy import load_file

        file = directory / "adapter_model.safetensors"
        renamed = {k.replace("self_attn.q", "mlp.side"): v for k, v in load_file(file).items()}
        save_file(renamed, file)
    with pytest.raises(ModelLoadError, match=message):
        engine.load_adapter("bad", directory)
    assert engine.adapter_names == ("large", "small")


def test_names_and_slots_are_checked(engine, root, model, tmp_path):
    with pytest.raises(ConfigError, match="'small' is loaded already"):
        engine.load_adapter("small", root / "small")
    with pytest.raises(ConfigError, match="the model's own name"):
        engine.load_adapter("tiny", root / "small")
    engine.load_adapter("third", root / "small")
    with pytest.raises(ConfigError, match=r"max_loras=3 adapters are loaded \(large, small, thi"):
        engine.load_adapter("fourth", root / "small")
    with pytest.raises(ConfigError, match="no adapter 'fourth' is loaded"):
        engine.unload_adapter("fourth")
    plain = make(model)
    with pytest.raises(ConfigError, match="start it with enable_lora"):
        plain.load_adapter("small", root / "small")
    with pytest.raises(RequestError, match="no adapter 'small' is loaded; there are: none"):
        plain.add_request("r", PROMPT, GREEDY, adapter="small")
    plain.close()
    with pytest.raises(ConfigError, match="enable_lora finds no matrix to adapt"):
        make(from_nnx(nnx_models.Decoder([(None, 2)])), enable_lora=True)


class Opened:
    """The files that this process opens, while it listens. A hook cannot be taken back."""

    def __init__(self):
        self.listens = False
        self.paths: list[str] = []
        sys.addaudithook(self._hear)

    def _hear(self, event: str, args: tuple) -> None:
        if self.listens and event == "open":
            self.paths.append(str(args[0]))


def test_a76_no_name_of_an_adapter_leads_out_of_its_folder(engine, root, model, tmp_path):
    outside = write_adapter(tmp_path / "outside", model, rank=2, targets=ATTENTION, seed=9)
    (root / "link").symlink_to(outside)
    inner = root / "inner"
    inner.mkdir()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (inner / name).symlink_to(outside / name)
    names = ["../outside", f"../{outside.name}", str(outside), "..", ".", "", "a/b", "..%2Foutside"]
    names += ["%2e%2e/outside", "small\\..\\..", "small\0", "link", "inner", "missing"]
    opened = Opened()
    opened.listens = True
    for name in names:
        with pytest.raises((ModelLoadError, ConfigError)):
            engine.load_adapter(name)
    opened.listens = False
    assert not [path for path in opened.paths if "outside" in path]
    (root / "link").unlink()
    for name in ("adapter_config.json", "adapter_model.safetensors"):
        (inner / name).unlink()
    inner.rmdir()
