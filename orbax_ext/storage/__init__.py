"""Disks and buckets: what a checkpoint holds, and checkpoints on s3://."""

from orbax_ext.storage.s3 import disable_s3, enable_s3, s3_enabled, s3_usage

__all__ = ["disable_s3", "enable_s3", "s3_enabled", "s3_usage"]
