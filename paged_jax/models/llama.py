"""The Llama family: grouped queries, rotary positions, RMS norms and gated MLPs."""

import dataclasses
from collections.abc import Mapping
from typing import Any

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paged_jax.attention import Attend
from paged_jax.errors import ModelLoadError
from paged_jax.layers import Embedding, GatedMLP, Linear, RMSNorm, linear
from paged_jax.models.config_fields import flag, only, positive_float, positive_int
from paged_jax.rope import Rope, rotate

__all__ = ["Llama", "LlamaConfig", "aliases", "tensor_name"]

Angles = tuple[Float[Array, "T P"], Float[Array, "T P"]]


@dataclasses.dataclass(frozen=True)
class LlamaConfig:
    """The sizes and switches of one model."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    max_position: int
    rms_norm_eps: float
    rope: Rope
    tie_word_embeddings: bool
    attention_bias: bool
    mlp_bias: bool

    @classmethod
    def from_hf(cls, config: Mapping[str, Any]) -> "LlamaConfig":
        """Read a config.json. Raises ModelLoadError, naming the key, for what is not supported."""
        only(config, "hidden_act", "silu", "swish")
        only(config, "quantization_config", None)
        hidden_size = positive_int(config, "hidden_size")
        num_heads = positive_int(config, "num_attention_heads")
        num_kv_heads = positive_int(config, "num_key_value_heads", num_heads)
        if num_heads % num_kv_heads:
            raise ModelLoadError(
                f"config.json: num_attention_heads={num_heads} must be a multiple of "
                f"num_key_value_heads={num_kv_heads}"
            )
        if config.get("head_dim") is None and hidden_size % num_heads:
            raise ModelLoadError(
                f"config.json: {hidden_size=} must be a multiple of "
                f"num_attention_heads={num_heads}, or head_dim be given"
            )
        head_size = positive_int(config, "head_dim", hidden_size // num_heads)
        return cls(
            vocab_size=positive_int(config, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=positive_int(config, "intermediate_size"),
            num_layers=positive_int(config, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            max_position=positive_int(config, "max_position_embeddings", 2048),
            rms_norm_eps=positive_float(config, "rms_norm_eps", 1e-6),
            rope=Rope.from_hf(config, head_size=head_size),
            tie_word_embeddings=flag(config, "tie_word_embeddings", False),
            attention_bias=flag(config, "attention_bias", False),
            mlp_bias=flag(config, "mlp_bias", False),
        )


class Llama(nnx.Module):
    """A decoder behind the model contract: hidden states, and logits of the rows that need them."""

    def __init__(self, config: LlamaConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        E, V = config.hidden_size, config.vocab_size
        self.config = config
        self.embed_tokens = Embedding(V, E, dtype=dtype, rngs=rngs)
        self.layers = nnx.List(
            [DecoderLayer(config, i, dtype=dtype, rngs=rngs) for i in range(config.num_layers)]
        )
        self.norm = RMSNorm(E, eps=config.rms_norm_eps, dtype=dtype)
        tied = config.tie_word_embeddings
        self.lm_head = None if tied else Linear(E, V, bias=False, dtype=dtype, rngs=rngs)

    def __call__(
        self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], attend: Attend
    ) -> Float[Array, "T E"]:
        """Hidden states after the last norm."""
        angles = self.config.rope(positions)
        hidden = self.embed_tokens(token_ids)
        for layer in self.layers:
            hidden = layer(hidden, angles, attend)
        return self.norm(hidden)

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores of the next token."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        return linear(hidden, head.weight[...], dtype=jnp.float32)


class DecoderLayer(nnx.Module):
    """Attention and MLP, each behind a norm and added to what came in."""

    def __init__(
        self, config: LlamaConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        E, eps = config.hidden_size, config.rms_norm_eps
        self.input_layernorm = RMSNorm(E, eps=eps, dtype=dtype)
        self.self_attn = Attention(config, index, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = RMSNorm(E, eps=eps, dtype=dtype)
        self.mlp = GatedMLP(
            E, config.intermediate_size, bias=config.mlp_bias, dtype=dtype, rngs=rngs
        )

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles, attend: Attend
    ) -> Float[Array, "T E"]:
        x = x + self.self_attn(self.input_layernorm(x), angles, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


class Attention(nnx.Module):
    """Projections and rotation; what is seen is `attend`'s business."""

    def __init__(
        self, config: LlamaConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.index = index
        self.head_size = config.head_size
        E, D, bias = config.hidden_size, config.head_size, config.attention_bias
        H, K = config.num_heads, config.num_kv_heads
        self.q_proj = Linear(E, H * D, bias=bias, dtype=dtype, rngs=rngs)
        self.k_proj = Linear(E, K * D, bias=bias, dtype=dtype, rngs=rngs)
        self.v_proj = Linear(E, K * D, bias=bias, dtype=dtype, rngs=rngs)
        self.o_proj = Linear(H * D, E, bias=bias, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "T E"], angles: Angles, attend: Attend
    ) -> Float[Array, "T E"]:
        heads = (x.shape[0], -1, self.head_size)
        q = rotate(self.q_proj(x).reshape(heads), angles)
        k = rotate(self.k_proj(x).reshape(heads), angles)
        v = self.v_proj(x).reshape(heads)
        return self.o_proj(attend(q, k, v, layer=self.index).reshape(x.shape[0], -1))


def tensor_name(path: tuple[str | int, ...]) -> str:
    """The name in a Hugging Face checkpoint of the parameter at `path` of a Llama."""
    name = ".".join(map(str, path))
    return name if path[0] == "lm_head" else f"model.{name}"


def aliases(config: LlamaConfig) -> dict[str, str]:
    """Tensors that a file may repeat although the model uses another in their place."""
    return {"lm_head.weight": "model.embed_tokens.weight"} if config.tie_word_embeddings else {}
