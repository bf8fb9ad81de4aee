"""Commands of the key store; `python -m kvloom.server.secure.keystore` is `seceasy_encrypt`."""
