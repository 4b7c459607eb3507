"""`orbax-ext check`: a restore for real, thrown away."""

from orbax_ext.cli.check.command import configure

__all__ = ["configure"]
