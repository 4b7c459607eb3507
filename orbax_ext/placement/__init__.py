"""Puts host data on the devices of many hosts, and takes it back, without hidden collectives.

Nothing here runs a program across processes, except `match_sharding` where data has to move between them. Each process
puts its own data on its own devices. Where processes must agree, they compare digests over the coordination service,
with a time limit, and errors name the processes that differ or are missing.

    put.py              replicate, shard, stitch: global arrays from each host's own data
    stacked.py          stack, unstack, device_put_replicated, device_put_sharded: pmap's leading device axis
    stacked_restore.py  restores of checkpoints whose state has that axis, or lacks it
    match.py            match_sharding: shardings that must be spelled the same
    agree.py            barrier, and the comparison behind check=True
    pieces.py           one leaf: its copy on this host, and its parts on devices
    specs.py            canonical_spec; partition specs and index arithmetic, pure
"""

from orbax_ext.placement.agree import barrier
from orbax_ext.placement.match import match_sharding
from orbax_ext.placement.put import replicate, shard, stitch
from orbax_ext.placement.specs import canonical_spec
from orbax_ext.placement.stacked import device_put_replicated, device_put_sharded, stack, unstack

__all__ = [
    "barrier",
    "canonical_spec",
    "device_put_replicated",
    "device_put_sharded",
    "match_sharding",
    "replicate",
    "shard",
    "stack",
    "stitch",
    "unstack",
]
