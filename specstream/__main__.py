"""`python -m specstream` is the `specstream` command."""

import sys

from specstream.cli import main

if __name__ == "__main__":
    sys.exit(main())
