"""`make bench`: restores by several ways on the same hosts, links and checkpoints, in one table."""
