"""Secrets of the configuration, encrypted at rest; `python -m kvloom.server.keystore` is `seceasy_encrypt`."""

from kvloom.server.keystore.store import KeyStore, KeyStoreError, is_encrypted, write_private

__all__ = ["KeyStore", "KeyStoreError", "is_encrypted", "write_private"]
