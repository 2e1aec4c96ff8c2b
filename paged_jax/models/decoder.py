"""Decoders of the Llama lineage: one skeleton, and three ways to put norms around its parts."""

from functools import partial

import jax.numpy as jnp
from flax import nnx
from jax.typing import DTypeLike
from jaxtyping import Array, Float, Int

from paged_jax.attention import Attend
from paged_jax.layers import ACTIVATIONS, Embedding, GatedMLP, Linear, RMSNorm, linear
from paged_jax.models.decoder_config import DecoderConfig, MLPConfig
from paged_jax.models.experts import SparseMLP
from paged_jax.rope import Rope, rotate

__all__ = ["Decoder"]

Angles = tuple[Float[Array, "T P"], Float[Array, "T P"]]


class Decoder(nnx.Module):
    """A decoder behind the model contract: hidden states, and logits of the rows that need them."""

    def __init__(self, config: DecoderConfig, *, dtype: DTypeLike, rngs: nnx.Rngs) -> None:
        E, V = config.hidden_size, config.vocab_size
        self.config = config
        tied = config.tie_word_embeddings
        self.embed_tokens = Embedding(V, E, is_head=tied, dtype=dtype, rngs=rngs)
        layer = {"pre": PreNormLayer, "post": PostNormLayer, "both": SandwichLayer}[config.norms]
        self.layers = nnx.List(
            [layer(config, i, dtype=dtype, rngs=rngs) for i in range(len(config.layers))]
        )
        self.norm = _norm(config, dtype)
        head = partial(Linear, E, V, bias=False, dtype=dtype, rngs=rngs, split="outputs")
        self.lm_head = None if tied else head()

    def __call__(
        self, token_ids: Int[Array, " T"], positions: Int[Array, " T"], attend: Attend
    ) -> Float[Array, "T E"]:
        """Hidden states after the last norm."""
        ropes = {layer.rope for layer in self.config.layers if layer.rope is not None}
        angles = {rope: rope(positions) for rope in ropes}
        hidden = self.embed_tokens(token_ids)
        if self.config.embedding_scale is not None:
            hidden = hidden * jnp.asarray(self.config.embedding_scale, hidden.dtype)
        for layer in self.layers:
            hidden = layer(hidden, angles, attend)
        return self.norm(hidden)

    def logits(self, hidden: Float[Array, "R E"]) -> Float[Array, "R V"]:
        """float32 scores of the next token."""
        head = self.embed_tokens if self.lm_head is None else self.lm_head
        scores = linear(hidden, head.weight[...], dtype=jnp.float32)
        if self.config.logits_divisor is not None:
            scores = scores / self.config.logits_divisor
        cap = self.config.logits_softcap
        return scores if cap is None else cap * jnp.tanh(scores / cap)


class PreNormLayer(nnx.Module):
    """Llama's layer: attention and MLP, each behind a norm and added to what came in."""

    def __init__(
        self, config: DecoderConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.residual_scale = config.residual_scale
        self.input_layernorm = _norm(config, dtype)
        self.self_attn = Attention(config, index, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = _norm(config, dtype)
        self.mlp = _mlp(config, index, dtype=dtype, rngs=rngs)

    def __call__(
        self, x: Float[Array, "T E"], angles: dict[Rope, Angles], attend: Attend
    ) -> Float[Array, "T E"]:
        x = x + self._scaled(self.self_attn(self.input_layernorm(x), angles, attend))
        return x + self._scaled(self.mlp(self.post_attention_layernorm(x)))

    def _scaled(self, x: Float[Array, "T E"]) -> Float[Array, "T E"]:
        return x if self.residual_scale is None else x * self.residual_scale


class PostNormLayer(nnx.Module):
    """OLMo 2's layer: what attention and MLP give is normed before it is added."""

    def __init__(
        self, config: DecoderConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.self_attn = Attention(config, index, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = _norm(config, dtype)
        self.mlp = _mlp(config, index, dtype=dtype, rngs=rngs)
        self.post_feedforward_layernorm = _norm(config, dtype)

    def __call__(
        self, x: Float[Array, "T E"], angles: dict[Rope, Angles], attend: Attend
    ) -> Float[Array, "T E"]:
        x = x + self.post_attention_layernorm(self.self_attn(x, angles, attend))
        return x + self.post_feedforward_layernorm(self.mlp(x))


class SandwichLayer(nnx.Module):
    """Gemma's layer: a norm before and another after attention, and so around the MLP."""

    def __init__(
        self, config: DecoderConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        self.input_layernorm = _norm(config, dtype)
        self.self_attn = Attention(config, index, dtype=dtype, rngs=rngs)
        self.post_attention_layernorm = _norm(config, dtype)
        self.pre_feedforward_layernorm = _norm(config, dtype)
        self.mlp = _mlp(config, index, dtype=dtype, rngs=rngs)
        self.post_feedforward_layernorm = _norm(config, dtype)

    def __call__(
        self, x: Float[Array, "T E"], angles: dict[Rope, Angles], attend: Attend
    ) -> Float[Array, "T E"]:
        attended = self.self_attn(self.input_layernorm(x), angles, attend)
        x = x + self.post_attention_layernorm(attended)
        fed = self.mlp(self.pre_feedforward_layernorm(x))
        return x + self.post_feedforward_layernorm(fed)


class Attention(nnx.Module):
    """Projections and rotation; what is seen is `attend`'s business."""

    def __init__(
        self, config: DecoderConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs
    ) -> None:
        attention = config.attention
        self.index = index
        self.attention = attention
        self.rope, self.window = config.layers[index].rope, config.layers[index].window
        E, D = config.hidden_size, attention.head_size
        H, K = attention.num_heads, attention.num_kv_heads
        layer = partial(Linear, dtype=dtype, rngs=rngs)
        self.q_proj = layer(E, H * D, bias=attention.bias, split="outputs")
        self.k_proj = layer(E, K * D, bias=attention.bias, split="kv_outputs")
        self.v_proj = layer(E, K * D, bias=attention.bias, split="kv_outputs")
        self.o_proj = layer(H * D, E, bias=attention.out_bias, split="inputs")
        sizes = {"none": (0, 0), "head": (D, D), "projection": (H * D, K * D)}[attention.norm]
        self.q_norm, self.k_norm = (_norm(config, dtype, size) if size else None for size in sizes)
        self.sinks = nnx.Param(jnp.zeros(H, dtype)) if attention.sinks else None

    def __call__(
        self, x: Float[Array, "T E"], angles: dict[Rope, Angles], attend: Attend
    ) -> Float[Array, "T E"]:
        q = self._heads(self.q_proj(x), self.q_norm)
        k = self._heads(self.k_proj(x), self.k_norm)
        v = self._heads(self.v_proj(x), None)
        if self.rope is not None:
            q, k = (rotate(part, angles[self.rope]) for part in (q, k))
        out = attend(
            q,
            k,
            v,
            layer=self.index,
            scale=self.attention.scale,
            window=self.window,
            softcap=self.attention.softcap,
            sinks=None if self.sinks is None else self.sinks[...],
        )
        return self.o_proj(out.reshape(x.shape[0], -1))

    def _heads(self, x: Float[Array, "T F"], norm: RMSNorm | None) -> Float[Array, "T H D"]:
        shape = (x.shape[0], -1, self.attention.head_size)
        if norm is None:
            return x.reshape(shape)
        if self.attention.norm == "projection":
            return norm(x).reshape(shape)
        return norm(x.reshape(shape))


def _norm(config: DecoderConfig, dtype: DTypeLike, size: int | None = None) -> RMSNorm:
    size = size or config.hidden_size
    return RMSNorm(size, eps=config.rms_norm_eps, dtype=dtype, offset=config.norm_offset)


def _mlp(
    config: DecoderConfig, index: int, *, dtype: DTypeLike, rngs: nnx.Rngs
) -> GatedMLP | SparseMLP:
    mlp = config.layers[index].mlp
    if not isinstance(mlp, MLPConfig):
        return SparseMLP(config.hidden_size, mlp, dtype=dtype, rngs=rngs)
    return GatedMLP(
        config.hidden_size,
        mlp.inner_size,
        bias=mlp.bias,
        dtype=dtype,
        rngs=rngs,
        activation=ACTIVATIONS[mlp.activation],
    )
