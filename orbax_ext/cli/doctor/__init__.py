"""`orbax-ext doctor`: lists what would break a restore with this installation, and what fixes it."""
