"""Deltas on their way from a replica to an ingress: all of its requests share one stream of items."""
