"""The Python client of the inference server: spec 4."""
