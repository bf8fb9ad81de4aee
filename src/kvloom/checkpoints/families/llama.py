"""Llama 1 to 3 and the many models of the same shape (SmolLM2 among them)."""

from kvloom.checkpoints.families.family import Family

LLAMA = Family("llama", permuted_gguf=True)
