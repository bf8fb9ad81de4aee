"""The backends that compute a step: their contract, the CPU kernels, the torch reference."""
