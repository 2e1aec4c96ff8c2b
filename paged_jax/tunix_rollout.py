"""An engine behind the rollout interface of Tunix, which is neither imported nor needed.

    from paged_jax.tunix_rollout import TunixRollout

    rollout = TunixRollout(Engine.from_nnx(actor, tokenizer=tokenizer, max_num_seqs=32))
    output = rollout.generate(prompts, rollout_config)
    rollout.update_params(nnx.state(actor, nnx.Param))

(The interface: `BaseRollout` in google/tunix, tunix/rl/rollout/base_rollout.py.)
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from flax import nnx

from paged_jax.engine import Engine
from paged_jax.errors import ConfigError
from paged_jax.llm import LLM
from paged_jax.outputs import RequestOutput
from paged_jax.prompts import encode_prompt
from scheduler import SamplingParams, derive_seed

__all__ = ["RolloutConfig", "RolloutOutput", "TunixRollout"]


class RolloutConfig(Protocol):
    """What is read of Tunix's `RolloutConfig`; the rest of it configures other engines."""

    max_tokens_to_generate: int
    temperature: float
    top_p: float | None
    top_k: int | None
    seed: Any  # an integer, or a JAX array that holds one or a key
    max_prompt_length: int
    eos_tokens: list[int] | None


@dataclass
class RolloutOutput:
    """The fields of Tunix's own. N samples, one a prompt, padded with `pad_id`."""

    text: list[str]
    logits: None  # not kept: the log-probabilities are what is learnt from
    tokens: np.ndarray  # i32[N, max_tokens_to_generate], padded on the right
    left_padded_prompt_tokens: np.ndarray  # i32[N, max_prompt_length]
    logprobs: list[list[float]]  # of each sampled token, after temperature and filters


class TunixRollout:
    """Generates, scores and takes new weights, one call at a time."""

    def __init__(self, engine: Engine, *, pad_id: int | None = None):
        """`pad_id` is by default the first end-of-sequence token, or 0 where there is none."""
        self._engine = engine
        self._llm = LLM(engine)
        self._pad_id = self.eos_id() if pad_id is None else pad_id

    def generate(
        self, prompts: Sequence[str] | Sequence[Sequence[int]], rollout_config: RolloutConfig
    ) -> RolloutOutput:
        """A sample of each prompt: texts, or token ids. Longer ones keep their last tokens.

        With a seed in the config, prompt i draws with a seed of its own derived from it.
        """
        config = rollout_config
        most = config.max_prompt_length
        encoded = [encode_prompt(_as_prompt(p), self._engine.tokenizer)[1] for p in prompts]
        cut = [list(ids)[-most:] for ids in encoded]
        params = [self._params(config, i) for i in range(len(cut))]
        outputs = self._llm.generate(
            [{"prompt_token_ids": ids} for ids in cut], params, use_progress=False
        )
        samples = [output.outputs[0] for output in outputs]
        return RolloutOutput(
            text=[sample.text for sample in samples],
            logits=None,
            tokens=self._padded([s.token_ids for s in samples], config.max_tokens_to_generate),
            left_padded_prompt_tokens=self._padded(cut, most, left=True),
            logprobs=[_logprobs(output) for output in outputs],
        )

    def _params(self, config: RolloutConfig, index: int) -> SamplingParams:
        own_ends = config.eos_tokens is not None
        return SamplingParams(
            max_tokens=config.max_tokens_to_generate,
            temperature=config.temperature,
            top_p=1.0 if config.top_p is None else config.top_p,
            top_k=0 if config.top_k is None else config.top_k,
            seed=None if config.seed is None else derive_seed(_integer(config.seed), index),
            stop_token_ids=tuple(config.eos_tokens or ()),
            ignore_eos=own_ends,
            logprobs=0,
            logprobs_mode="processed",
        )

    def _padded(
        self, rows: Sequence[Sequence[int]], length: int, *, left: bool = False
    ) -> np.ndarray:
        out = np.full((len(rows), length), self._pad_id, np.int32)
        for line, row in zip(out, rows, strict=True):
            start = length - len(row) if left else 0
            line[start : start + len(row)] = row
        return out

    def get_per_token_logps(
        self, prompt_tokens: Any, completion_tokens: Any, completion_mask: Any = None
    ) -> jax.Array:
        """float32[N, C]: raw log-probabilities of completions, 0 where they are padding.

        Prompts are padded on the left, completions on the right; `completion_mask` [N, C] says
        which tokens count, by default those before the padding.
        """
        prompts, completions = np.asarray(prompt_tokens), np.asarray(completion_tokens)
        if completion_mask is None:
            ends = self._pad_id in self._engine.eos_token_ids
            counts = [_length(row, self._pad_id, with_end=ends) for row in completions]
        else:
            counts = np.asarray(completion_mask).astype(np.int32).sum(axis=1).tolist()
        rows = [
            [*_unpadded(prompt, self._pad_id), *completion[:count].tolist()]
            for prompt, completion, count in zip(prompts, completions, counts, strict=True)
        ]
        out = np.zeros(completions.shape, np.float32)
        for line, scores, count in zip(out, self._engine.score(rows), counts, strict=True):
            line[:count] = scores[len(scores) - count :]
        return jax.numpy.asarray(out)

    def update_params(self, params: Any, filter_types: tuple[Any, ...] | None = None) -> None:
        """`Engine.update_params`. Only whole sets of `nnx.Param` are taken."""
        if filter_types is not None and tuple(filter_types) != (nnx.Param,):
            raise ConfigError(
                f"filter_types={filter_types!r}: all parameters are replaced at once, (nnx.Param,)"
            )
        self._engine.update_params(params)

    def pad_id(self) -> int:
        return self._pad_id

    def eos_id(self) -> int:
        return min(self._engine.eos_token_ids, default=0)

    def model(self) -> Engine:
        """What generates: the engine, which holds the only copy of its weights."""
        return self._engine


def _as_prompt(prompt: Any) -> Any:
    return prompt if isinstance(prompt, str) else {"prompt_token_ids": list(map(int, prompt))}


def _integer(seed: Any) -> int:
    """An integer as it is; of a JAX key, its words."""
    if isinstance(seed, jax.Array) and jax.numpy.issubdtype(seed.dtype, jax.dtypes.prng_key):
        seed = jax.random.key_data(seed)
    words = np.asarray(seed).ravel().astype(np.uint64).tolist()
    return sum(word << (32 * i) for i, word in enumerate(reversed(words[-2:])))


def _logprobs(output: RequestOutput) -> list[float]:
    return [entry.logprob for entry in output.outputs[0].logprobs or ()]


def _length(row: np.ndarray, pad_id: int, *, with_end: bool) -> int:
    """Tokens of a row before its padding, with one of it where that is the end of a sequence."""
    kept = np.flatnonzero(row != pad_id)
    length = int(kept[-1]) + 1 if len(kept) else 0
    return min(len(row), length + with_end)


def _unpadded(row: np.ndarray, pad_id: int) -> list[int]:
    kept = np.flatnonzero(row != pad_id)
    return row[kept[0] :].tolist() if len(kept) else row[-1:].tolist()
