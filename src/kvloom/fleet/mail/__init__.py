"""Deltas on their way from a replica to an ingress: all requests of the ingress share one stream of items."""
