"""Homes: which node is a block's home. Pure.

Rendezvous hashing (Thaler and Ravishankar 1998): each node draws a number for each key and the highest has it. A node
that joins takes over its share of the keys, 1/n, and no more; a node that leaves gives its share to all the others.
"""

import hashlib
from collections.abc import Iterable


def home(key: bytes, node_ids: Iterable[str]) -> str:
    """The id of the key's home among `node_ids`, of which there must be one at least."""
    return max(node_ids, key=lambda node_id: (_draw(key, node_id), node_id))


def _draw(key: bytes, node_id: str) -> bytes:
    return hashlib.blake2b(key + node_id.encode(), digest_size=8).digest()
