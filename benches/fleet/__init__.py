"""Benches of replicas behind one address."""
