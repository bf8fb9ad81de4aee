"""Responses and conversations that outlive their request: `database.py` is the file, `store.py` the thread it has."""
