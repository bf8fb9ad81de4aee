"""`python -m kvloom` is `kvloom`."""

from kvloom.cli import main

if __name__ == "__main__":  # processes that a command spawns import this file too
    main()
