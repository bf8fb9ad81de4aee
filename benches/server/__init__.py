"""Benches of the server over HTTP, as its clients see it."""
