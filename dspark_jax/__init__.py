"""dspark_jax: the DSpark speculative-decoding drafter for JAX."""

__version__ = "0.1.0"
