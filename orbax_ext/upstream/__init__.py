"""Everything private of Orbax and JAX that we touch, and every difference between their releases.

No other room imports from `orbax.checkpoint._src`, `orbax.checkpoint.experimental.v1._src` or `jax._src`.
"""
