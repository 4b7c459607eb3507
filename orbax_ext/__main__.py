"""`python -m orbax_ext COMMAND`, the same as `orbax-ext COMMAND`."""

import sys

from orbax_ext.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
