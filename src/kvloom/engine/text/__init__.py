"""Text and token ids: tokenizers, chat templates, detokenising, stop strings."""
