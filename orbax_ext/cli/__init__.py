"""The commands of `orbax-ext`, one module or folder each.

Each has `configure(parser)`, which adds its arguments and sets `run`; `run(args)` returns the exit code.
"""
