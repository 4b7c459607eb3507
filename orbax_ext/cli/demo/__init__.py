"""`orbax-ext demo`: a story in acts, on local clusters of real processes."""
