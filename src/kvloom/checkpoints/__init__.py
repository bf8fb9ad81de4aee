"""Model files: safetensors and GGUF, model families, LoRA adapters, the demo models."""
