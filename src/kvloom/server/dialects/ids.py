"""Ids that a dialect makes up: of answers and of their parts."""

import uuid


def new_id() -> str:
    """32 hexadecimal digits that no other id has."""
    return uuid.uuid4().hex
