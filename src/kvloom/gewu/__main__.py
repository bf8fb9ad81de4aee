"""`python -m kvloom.gewu`: the same as `kvloom gewu`."""

from kvloom.gewu.cli import app

if __name__ == "__main__":
    app(prog_name="kvloom gewu")
