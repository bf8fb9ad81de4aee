"""What becomes of a model's states: how they are pooled, and the layers behind that."""
