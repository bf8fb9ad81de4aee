"""Key store: secrets of the configuration (the password of the TLS key) are kept encrypted on disk.

    master key (in the store's files)  --wraps-->  domain keys  --encrypt-->  the texts that users keep in other files

The store is two files with the same content, master and standby. Either is enough; a damaged or missing one is
rewritten from the other. Everything is AES-256-GCM. Anyone who can read a store file can decrypt, so mode 0600 is its
protection; encryption makes copies of the configuration, or backups without the store, worthless.
"""

import base64
import binascii
import hashlib
import json
import os
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from kvloom.contract.errors import UserError
from kvloom.reading import read_bytes
from kvloom.writing import write_private

FORMAT = 1
PREFIX = "kvk1"
NONCE_BYTES = 12
KEY_BITS = 256
MAX_STORE_BYTES = 1024 * 1024


class KeyStoreError(UserError):
    """The message names the file or the argument, never a secret."""


@dataclass(slots=True)
class _Content:
    generation: int  # incremented by every write: after a crash between the two writes, the newer file is used
    master_key: bytes
    active: dict[int, int] = field(default_factory=dict)  # domain -> id of the key that encrypts
    wrapped: dict[tuple[int, int], bytes] = field(default_factory=dict)  # (domain, key id) -> nonce + ciphertext


class KeyStore:
    """One process at a time may change a store; any number may read it."""

    def __init__(self, master: Path, standby: Path) -> None:
        self._paths = (master, standby)

    def encrypt(self, plaintext: bytes, domain: int) -> str:
        """Encrypt a text; creates the store and the domain's key if needed."""
        content = self._load() or _Content(generation=0, master_key=AESGCM.generate_key(KEY_BITS))
        if domain not in content.active:
            _add_domain_key(content, domain)
            self._save(content)
        key_id = content.active[domain]
        name = f"{PREFIX}:{domain}:{key_id}"
        sealed = _seal(_domain_key(content, domain, key_id), plaintext, name)
        return f"{name}:{base64.b64encode(sealed).decode()}"

    def decrypt(self, text: str) -> bytes:
        content = self._load()
        if content is None:
            raise KeyStoreError(f"there is no key store at {self._paths[0]} or {self._paths[1]}")
        name, domain, key_id, sealed = _parse(text)
        return _open(_domain_key(content, domain, key_id), sealed, name)

    def rotate(self, domain: int) -> None:
        """Create a new master key and a new key of `domain`. Texts encrypted before can still be decrypted."""
        content = self._load()
        if content is None:
            raise KeyStoreError(
                f"there is no key store at {self._paths[0]} or {self._paths[1]}: encrypt something first"
            )
        keys = {slot: _domain_key(content, *slot) for slot in content.wrapped}
        content.master_key = AESGCM.generate_key(KEY_BITS)
        content.wrapped = {slot: _seal(content.master_key, key, f"{slot[0]}:{slot[1]}") for slot, key in keys.items()}
        _add_domain_key(content, domain)
        self._save(content)

    def erase(self) -> int:
        """Overwrite and remove both files. Returns how many there were. Texts encrypted with them are lost."""
        found = [path for path in self._paths if path.exists()]
        for path in found:
            size_bytes = path.stat().st_size
            with path.open("r+b") as file:
                file.write(secrets.token_bytes(size_bytes))
                file.flush()
                os.fsync(file.fileno())
            path.unlink()
        return len(found)

    def _load(self) -> _Content | None:
        """Contents of the store; None if neither file exists. Repairs a file that is damaged, missing or older."""
        contents = [_read(path) for path in self._paths]
        if not any(path.exists() for path in self._paths):
            return None
        whole = [content for content in contents if content is not None]
        if not whole:
            raise KeyStoreError(f"both key store files are damaged: {self._paths[0]} and {self._paths[1]}")
        newest = max(whole, key=lambda content: content.generation)
        for path, content in zip(self._paths, contents, strict=True):
            if content is None or content.generation < newest.generation:
                write_private(path, _dump(newest))
        return newest

    def _save(self, content: _Content) -> None:
        content.generation += 1
        for path in self._paths:
            write_private(path, _dump(content))


def is_encrypted(text: str) -> bool:
    return text.startswith(f"{PREFIX}:")


def _add_domain_key(content: _Content, domain: int) -> None:
    key_id = content.active.get(domain, 0) + 1
    content.wrapped[domain, key_id] = _seal(content.master_key, AESGCM.generate_key(KEY_BITS), f"{domain}:{key_id}")
    content.active[domain] = key_id


def _domain_key(content: _Content, domain: int, key_id: int) -> bytes:
    wrapped = content.wrapped.get((domain, key_id))
    if wrapped is None:
        raise KeyStoreError(f"the key store has no key {key_id} of domain {domain}: the text comes from another store")
    return _open(content.master_key, wrapped, f"{domain}:{key_id}")


def _seal(key: bytes, plaintext: bytes, name: str) -> bytes:
    nonce = secrets.token_bytes(NONCE_BYTES)
    return nonce + AESGCM(key).encrypt(nonce, plaintext, name.encode())


def _open(key: bytes, sealed: bytes, name: str) -> bytes:
    try:
        return AESGCM(key).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], name.encode())
    except (InvalidTag, ValueError) as error:
        raise KeyStoreError("the encrypted text is damaged, or comes from another key store") from error


def _parse(text: str) -> tuple[str, int, int, bytes]:
    try:
        prefix, domain, key_id, encoded = text.strip().split(":")
        sealed = base64.b64decode(encoded, validate=True)
        if prefix != PREFIX:
            raise ValueError(prefix)
        return f"{prefix}:{int(domain)}:{int(key_id)}", int(domain), int(key_id), sealed
    except (ValueError, binascii.Error) as error:
        raise KeyStoreError("the text was not encrypted by seceasy_encrypt") from error


def _dump(content: _Content) -> bytes:
    body = {
        "generation": content.generation,
        "master_key": base64.b64encode(content.master_key).decode(),
        "active": {str(domain): key_id for domain, key_id in content.active.items()},
        "wrapped": {f"{d}:{k}": base64.b64encode(sealed).decode() for (d, k), sealed in content.wrapped.items()},
    }
    return json.dumps({"format": FORMAT, "digest": _digest(body), "body": body}).encode()


def _digest(body: dict[str, Any]) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _read(path: Path) -> _Content | None:
    """The file's contents; None if it is missing or damaged. Raises KeyStoreError if others may read it."""
    try:
        status = path.stat()
        if status.st_mode & 0o077:
            raise KeyStoreError(f"{path} may be read by others: set its mode to 0600")
        if status.st_size > MAX_STORE_BYTES:
            return None
        document = json.loads(read_bytes(path, MAX_STORE_BYTES))
        body = document["body"]
        if document["format"] != FORMAT or document["digest"] != _digest(body):
            return None
        slots = {name: name.split(":") for name in body["wrapped"]}
        return _Content(
            generation=int(body["generation"]),
            master_key=base64.b64decode(body["master_key"]),
            active={int(domain): int(key_id) for domain, key_id in body["active"].items()},
            wrapped={(int(d), int(k)): base64.b64decode(body["wrapped"][name]) for name, (d, k) in slots.items()},
        )
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError, AttributeError, OSError, RecursionError):
        return None
