"""Host data onto the devices of many hosts, and back, without hidden collectives.

Nothing here runs a program across processes, except `match_sharding` where data really has to move between them.
Each process puts what it holds on its own devices; where processes must agree, they do so over the coordination
service, with a time limit, and whoever differs or is missing is named.

    put.py      replicate, shard, stitch: from each host's own data
    stacked.py  stack, unstack and the old device_put_replicated, device_put_sharded: pmap's leading device axis
    match.py    match_sharding, canonical_spec: shardings that must agree to the letter
    agree.py    barrier, and the comparison behind check=True
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
