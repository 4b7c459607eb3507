"""Looks at a checkpoint of a large job on a laptop or in a notebook: no tree, no mesh, no job is described.

python look.py CHECKPOINTS
"""

# %% What is there?
import sys

import jax
import numpy as np

import orbax_ext

path = sys.argv[1]
abstract = orbax_ext.abstract(path)  # the newest step; shapes and dtypes only, nothing is read yet
for name, leaf in jax.tree_util.tree_leaves_with_path(abstract):
    print(jax.tree_util.keystr(name), getattr(leaf, "dtype", type(leaf).__name__), getattr(leaf, "shape", ""))

# %% Read it
state = orbax_ext.restore(path)

# %% Is anything wrong with it?
for name, leaf in jax.tree_util.tree_leaves_with_path(state):
    if isinstance(leaf, jax.Array) and jax.numpy.issubdtype(leaf.dtype, jax.numpy.floating):
        values = np.asarray(leaf).astype(np.float32)
        print(f"{jax.tree_util.keystr(name)}: mean {values.mean():.3g}, largest {abs(values).max():.3g}")
        if not np.isfinite(values).all():
            print(f"  {np.count_nonzero(~np.isfinite(values))} values are not finite")
