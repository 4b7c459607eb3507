"""The commands of `orbax-ext`, one module or folder each.

Each has the texts DESCRIPTION and EPILOG of its help, `configure(parser)`, which adds its arguments, and `run(args)`,
which prints the answer and returns whether it is good.
"""
