"""`orbax-ext check`: restores a checkpoint on this cluster and discards the result."""

from orbax_ext.cli.check.command import configure

__all__ = ["configure"]
