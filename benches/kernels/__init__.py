"""Of the CPU kernels, without an engine."""
