"""The Python client of the inference server: seed 001, chapter 4."""
