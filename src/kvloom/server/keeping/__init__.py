"""Responses and conversations that outlive their request: the file (`database.py`) and its thread (`store.py`)."""
