"""This machine's suitability for kvloom, and kvloom's files on it: `kvloom doctor`, `kvloom models`, `kvloom cache`."""
