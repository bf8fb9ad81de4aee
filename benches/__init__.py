"""Measurements with fixed inputs: one JSON line each, as ratios to a limit or a peer of the same run."""
