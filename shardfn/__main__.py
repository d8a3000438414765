"""`python -m shardfn`."""

import sys

from shardfn.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
