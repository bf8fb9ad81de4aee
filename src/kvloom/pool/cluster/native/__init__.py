"""Bytes of blocks between nodes in C++."""
