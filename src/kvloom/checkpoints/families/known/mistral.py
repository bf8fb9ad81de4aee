"""Mistral 7B and its successors: Llama with an optional sliding window. GGUF files call it llama."""

from kvloom.checkpoints.families.family import Family

MISTRAL = Family(
    "mistral",
    permuted_gguf=True,
    defaults={"sliding_window": 4096, "num_key_value_heads": 8, "max_position_embeddings": 131072},
)
