"""`python -m microturn_gateway`."""

import sys

from microturn_gateway.command import main

if __name__ == "__main__":
    sys.exit(main())
