"""Measurements: one JSON line each, fixed inputs, ratios against a limit or a peer of the same run."""
