"""Tensor parallel ranks: the mesh they meet in, and each one's share of the weights."""
