"""Benches of the CPU kernels, without an engine."""
