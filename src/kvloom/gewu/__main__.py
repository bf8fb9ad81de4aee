"""`python -m kvloom.gewu`: the same as `kvloom gewu`."""

import sys

from kvloom.entry import kvloom

if __name__ == "__main__":
    sys.argv[1:1] = ["gewu"]
    sys.exit(kvloom())
