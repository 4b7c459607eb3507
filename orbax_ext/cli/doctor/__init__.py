"""`orbax-ext doctor`: what of this machine and installation a restore needs."""

from orbax_ext.cli.doctor.command import configure

__all__ = ["configure"]
