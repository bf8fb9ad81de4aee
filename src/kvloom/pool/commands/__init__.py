"""The commands of `kvloom pool`, a file each."""
