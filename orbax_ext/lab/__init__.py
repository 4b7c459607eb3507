"""A local cluster of real JAX processes, to try things that need several hosts.

    from orbax_ext import lab

    def whoami():
        import jax
        return jax.process_index(), jax.device_count()

    if __name__ == "__main__":
        with lab.Cluster(processes=4, devices=8) as cluster:
            print(cluster.run(whoami))

The processes are ordinary ones: CPU devices, gloo collectives, `jax.distributed`. A cluster stays up and takes
one function after another; a function that hangs or kills a process costs its own run, and the next run starts
the cluster anew.
"""

from orbax_ext.lab.cluster import Cluster, Outcome, Run, RunFailedError
from orbax_ext.lab.protocol import Failure

__all__ = ["Cluster", "Failure", "Outcome", "Run", "RunFailedError"]
