"""Benches of the KV pool: one node, many nodes, and comparisons with other stores."""
