"""Reranking and scores of documents for a query, as in the APIs of Jina, Cohere and vLLM."""
