"""The package's version, readable without importing JAX."""

__version__ = "0.1.0"
