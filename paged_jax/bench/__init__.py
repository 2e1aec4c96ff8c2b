"""`paged-jax bench`: what the engine does, beside baselines, peers and the machine's limits."""
