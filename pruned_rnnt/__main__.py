"""`python -m pruned_rnnt` runs the command line, like `pruned-rnnt`."""

import sys

from pruned_rnnt.cli import main

if __name__ == "__main__":
    sys.exit(main())
