"""`orbax-ext check`: restores a checkpoint on this cluster and discards the result."""
