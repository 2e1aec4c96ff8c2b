"""What XLA is told when a program is compiled."""

import jax

__all__ = ["compile_options"]

# XLA's CPU hands parts of a program to YNNPACK. In JAX 0.10.2 a sum that goes there with the
# product before it can come out wrong (jax-ml/jax#39103), and one over many axes crash (#39257,
# #40412). So products alone go there, which costs no time.
CPU_OPTIONS = {"xla_cpu_experimental_ynn_fusion_type": "LIBRARY_FUSION_TYPE_INDIVIDUAL_DOT"}


def compile_options(device: jax.Device) -> dict[str, str]:
    """For `Lowered.compile` and `jax.jit`: what a program for this device is compiled with."""
    return dict(CPU_OPTIONS) if device.platform == "cpu" else {}
