"""The commands of `orbax-ext`, a module each: `add_parser(commands)` declares it, `run(args)` returns its exit code."""
