"""A local cluster of real JAX processes, to try on one machine what needs several hosts.

    from orbax_ext import lab

    def whoami():
        import jax
        return jax.process_index(), jax.device_count()

    if __name__ == "__main__":
        with lab.Cluster(processes=4, devices=8) as cluster:
            print(cluster.run(whoami))

The processes use CPU devices, gloo collectives and `jax.distributed`. A cluster stays up and runs one function after
another. If a function hangs or kills a process, only its own run fails: the next run starts the cluster again.
"""

from orbax_ext.lab.cluster import Cluster, Outcome, Run, RunFailedError
from orbax_ext.lab.forked import ForkServers
from orbax_ext.lab.protocol import Failure

__all__ = ["Cluster", "Failure", "ForkServers", "Outcome", "Run", "RunFailedError"]
