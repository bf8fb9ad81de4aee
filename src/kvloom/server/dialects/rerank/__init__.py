"""Reranking and scores: how well documents answer a query, as Jina, Cohere and vLLM have it."""
