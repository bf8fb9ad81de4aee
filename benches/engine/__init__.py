"""Benches of the engine and its ranks, without HTTP."""
