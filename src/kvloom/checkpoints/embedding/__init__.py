"""From a model's states to embeddings: the pooling, and the layers behind it."""
