"""Weights on disk: Hugging Face folders, and GGUF files turned into such folders."""

from paged_jax.checkpoint.gguf import convert_gguf
from paged_jax.checkpoint.hf import Checkpoint, open_checkpoint

__all__ = ["Checkpoint", "convert_gguf", "open_checkpoint"]
