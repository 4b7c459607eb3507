import sys

from orbax_ext.cli.main import main

sys.exit(main())
