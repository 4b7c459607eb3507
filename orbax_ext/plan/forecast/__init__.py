"""A plan for a cluster that is not here: what `orbax-ext plan` shows."""
