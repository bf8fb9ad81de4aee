"""`python -m kvloom` is `kvloom`."""

import sys

from kvloom.entry import kvloom

if __name__ == "__main__":  # processes that a command spawns import this file too
    sys.exit(kvloom())
