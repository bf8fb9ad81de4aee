"""Distributed stores behind the agents, for clusters beyond a few nodes."""
