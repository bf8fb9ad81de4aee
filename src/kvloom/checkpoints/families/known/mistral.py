"""Mistral 7B and its successors: Llama with an optional sliding window. GGUF files call it llama."""

from kvloom.checkpoints.families.family import Family

MISTRAL = Family("mistral", permuted_gguf=True)
