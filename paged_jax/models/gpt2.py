"""GPT-2: positions learned by heart, layer norms with biases, one MLP of two matrices."""

import dataclasses
from collections.abc import Mapping
from functools import partial

import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paged_jax.attention import Attend
from paged_jax.errors import ModelLoadError
from paged_jax.layers import ACTIVATIONS, Embedding, LayerNorm, Linear, linear
from paged_jax.models.config_fields import (
    Config,
    flag,
    only,
    positive_float,
    positive_int,
    text,
)
from paged_jax.models.sources import Path, Source, Tensor

__all__ = ["GPT2", "GPT2Config", "aliases", "canonical", "source"]


OTHER_NAMES = {  # that transformers takes as well
    "hidden_size": "n_embd",
    "num_attention_heads": "n_head",
    "num_hidden_layers": "n_layer",
    "max_position_embeddings": "n_positions",
}


@dataclasses.dataclass(frozen=True)
class GPT2Config:
    """The sizes and switches of one model."""

    vocab_size: int
    hidden_size: int
    inner_size: int
    num_layers: int
    num_heads: int
    max_position: int
    norm_eps: float
    activation: str
    scales: tuple[float, ...]  # of the scores, layer by layer
    tie_word_embeddings: bool

    @classmethod
    def parse(cls, config: Config) -> "GPT2Config":
        """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
        config = {OTHER_NAMES.get(key, key): value for key, value in config.items()}
        only(config, "quantization_config", None)
        only(config, "add_cross_attention", False)
        hidden_size, num_heads = positive_int(config, "n_embd"), positive_int(config, "n_head")
        if hidden_size % num_heads:
            raise ModelLoadError(f"config.json: n_embd={hidden_size} must divide by {num_heads=}")
        num_layers = positive_int(config, "n_layer")
        return cls(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            inner_size=positive_int(config, "n_inner", 4 * hidden_size),
            num_layers=num_layers,
            num_heads=num_heads,
            max_position=positive_int(config, "n_positions", 1024),
            norm_eps=positive_float(config, "layer_norm_epsilon", 1e-5),
            activation=text(config, "activation_function", "gelu_new", ACTIVATIONS),
            scales=_scales(config, num_layers, hidden_size // num_heads),
            tie_word_embeddings=flag(config, "tie_word_embeddings", True),
        )

    def for_context(self, context_len: int) -> "GPT2Config":
        """Learned positions are the same whatever the longest sequence is."""
        return self


def _scales(config: Config, num_layers: int, head_size: int) -> tuple[float, ...]:
    scale = head_size**-0.5 if flag(config, "scale_attn_weights", True) else 1.0
    by_depth = flag(config, "scale_attn_by_inverse_layer_idx", False)
    return tuple(scale / (i + 1) if by_depth else scale for i in range(num_layers))


class GPT2(nnx.Module):
    """A decoder behind the model contract: hidden states, and logits of the rows that need them."""

    def __init__(self, config: GPT2Config, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        E, V = config.hidden_size, config.vocab_size
        self.config = config
        tied = config.tie_word_embeddings
        self.wte = Embedding(V, E, is_head=tied, dtype=dtype, rngs=rngs)
        self.wpe = Embedding(config.max_position, E, dtype=dtype, rngs=rngs, split=False)
        self.h = nnx.List(
            [Block(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.ln_f = LayerNorm(E, eps=config.norm_eps, dtype=dtype)
        head = partial(Linear, E, V, bias=False, dtype=dtype, rngs=rngs, split="outputs")
        self.lm_head = None if tied else head()

    def __call__(
        self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], attend: Attend
    ) -> Float[Array, "T E"]:
        """Hidden states after the last norm."""
        hidden = self.wte(token_ids) + self.wpe(positions)
        for block in self.h:
            hidden = block(hidden, attend)
        return self.ln_f(hidden)

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores of the next token."""
        head = self.wte if self.lm_head is None else self.lm_head
        return linear(hidden, head.weight[...], dtype=jnp.float32)


class Block(nnx.Module):
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(self, config: GPT2Config, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        E, F, eps = config.hidden_size, config.inner_size, config.norm_eps
        self.index = index
        self.head_size = E // config.num_heads
        self.scale = config.scales[index]
        self.activation = ACTIVATIONS[config.activation]
        self.ln_1 = LayerNorm(E, eps=eps, dtype=dtype)
        layer = partial(Linear, bias=True, dtype=dtype, rngs=rngs)
        self.q_proj = layer(E, E, split="outputs")
        self.k_proj = layer(E, E, split="kv_outputs")
        self.v_proj = layer(E, E, split="kv_outputs")
        self.o_proj = layer(E, E, split="inputs")
        self.ln_2 = LayerNorm(E, eps=eps, dtype=dtype)
        self.up_proj = layer(E, F, split="outputs")
        self.down_proj = layer(F, E, split="inputs")

    def __call__(self, x: Float[Array, "T E"], attend: Attend) -> Float[Array, "T E"]:
        normed = self.ln_1(x)
        q, k, v = (
            projection(normed).reshape(x.shape[0], -1, self.head_size)
            for projection in (self.q_proj, self.k_proj, self.v_proj)
        )
        out = attend(q, k, v, layer=self.index, scale=self.scale)
        x = x + self.o_proj(out.reshape(x.shape[0], -1))
        return x + self.down_proj(self.activation(self.up_proj(self.ln_2(x))))


NAMES: Mapping[str, tuple[str, int, int]] = {  # the file's tensor; which of how many parts
    "q_proj": ("attn.c_attn", 0, 3),
    "k_proj": ("attn.c_attn", 1, 3),
    "v_proj": ("attn.c_attn", 2, 3),
    "o_proj": ("attn.c_proj", 0, 1),
    "up_proj": ("mlp.c_fc", 0, 1),
    "down_proj": ("mlp.c_proj", 0, 1),
}


def source(config: GPT2Config, path: Path) -> Source:
    """The file stores matrices `[in, out]`, and those of q, k and v side by side."""
    *parents, projection, kind = path
    if projection == "lm_head":
        return Tensor("lm_head.weight")
    if projection not in NAMES:
        return Tensor("transformer." + ".".join(map(str, path)))
    name, part, parts = NAMES[str(projection)]

    begin = part * config.hidden_size
    end = begin + config.hidden_size if part + 1 < parts else None

    def take(tensor: np.ndarray) -> np.ndarray:
        return tensor[..., begin:end].T

    return Tensor(f"transformer.{'.'.join(map(str, parents))}.{name}.{kind}", take)


def canonical(name: str) -> str:
    """Early files leave out the prefix."""
    return name if name.startswith(("transformer.", "lm_head.")) else f"transformer.{name}"


def aliases(config: GPT2Config) -> dict[str, str]:
    """Tensors that a file may repeat although the model uses another in their place."""
    return {"lm_head.weight": "transformer.wte.weight"} if config.tie_word_embeddings else {}
