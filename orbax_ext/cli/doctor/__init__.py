"""`orbax-ext doctor`: lists what would break a restore with this installation, and what fixes it."""

from orbax_ext.cli.doctor.command import configure

__all__ = ["configure"]
