"""API keys, and the rule for listening on all addresses.

Keys are stored as salted SHA-256, not scrypt: a key has at least 128 random bits, so a dictionary is useless, and a
slow hash for each request would let clients keep the server busy. Keys that people invent are refused for being too
short.
"""

import hashlib
import hmac
import ipaddress
import secrets
import socket
from collections.abc import Sequence
from pathlib import Path

from kvloom.contract.errors import UserError
from kvloom.mistakes import reason_of
from kvloom.reading import read_text

MIN_KEY_CHARS = 24
MAX_KEY_CHARS = 512
SALT_BYTES = 16
_SCHEME = "sha256"


class AccessError(UserError):
    """The configuration would open the server wider than it says. Never holds a key."""


def new_key() -> str:
    return f"kvl-{secrets.token_urlsafe(32)}"


def hash_key(key: str) -> str:
    """The form of a key in the configuration: `sha256$salt$digest`."""
    if not MIN_KEY_CHARS <= len(key) <= MAX_KEY_CHARS or not key.isascii() or not key.isprintable() or " " in key:
        raise AccessError(f"an API key must be {MIN_KEY_CHARS} to {MAX_KEY_CHARS} printable ASCII characters, no space")
    salt = secrets.token_bytes(SALT_BYTES)
    return f"{_SCHEME}${salt.hex()}${_digest(salt, key).hex()}"


def read_hashes(path: Path, option: str) -> tuple[str, ...]:
    """Hashes from a file, one a line; empty lines and those that begin with # are skipped. Raises AccessError, which
    names the `option`, or key, that gives the file.
    """
    try:
        lines = read_text(path).splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise AccessError(f"{option}: {path} cannot be read: {reason_of(error)}") from error
    found = {number: line.strip() for number, line in enumerate(lines, 1) if line.strip()}
    hashes = {number: line for number, line in found.items() if not line.startswith("#")}
    for number, line in hashes.items():
        _parsed(f"{option}: {path}, line {number}", line)
    if not hashes:
        raise AccessError(f"{option}: {path} holds no hash of an API key; make one with: kvloom api-key")
    return tuple(hashes.values())


class KeyRing:
    """The hashes of all valid keys. Raises AccessError when there is none, or one that is not a hash."""

    def __init__(self, hashes: Sequence[str]) -> None:
        if not hashes:
            raise AccessError("API keys are required, but none is configured")
        self._entries = [_parsed(f"API key {position}", text) for position, text in enumerate(hashes)]

    def tenant_of(self, key: str) -> str | None:
        """The tenant of this key, None for a wrong one. The name stays the same as long as the key's hash is kept.

        Always compares with every key, so that timing reveals neither which one matches nor how closely.
        """
        found = None
        for salt, digest in self._entries:
            if hmac.compare_digest(_digest(salt, key), digest):
                found = digest.hex()[:16]
        return found


def check_bind(address: str, is_all_allowed: bool, key: str = "ipAddress") -> None:
    """Raises AccessError for 0.0.0.0 and ::, which listen on every network, unless that is allowed. `address`: or a
    name, as configured.
    """
    try:
        found = [ipaddress.ip_address(address)]
    except ValueError:
        found = _addresses_of(address, key)
    if any(each.is_unspecified for each in found) and not is_all_allowed:
        raise AccessError(
            f"{key} {address} listens on every network of this machine; "
            "give one address, or set allowAllZeroIpListening to true if that is wanted"
        )


def _addresses_of(name: str, key: str) -> list[ipaddress.IPv4Address | ipaddress.IPv6Address]:
    try:
        found = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
    except (socket.gaierror, UnicodeError):
        raise AccessError(f"{key} must be an IP address or a name that is known here: {name!r}") from None
    return [ipaddress.ip_address(str(each[4][0]).partition("%")[0]) for each in found]


def _digest(salt: bytes, key: str) -> bytes:
    return hashlib.sha256(salt + key.encode()).digest()


def _parsed(where: str, text: str) -> tuple[bytes, bytes]:
    try:
        scheme, salt, digest = text.split("$")
        if scheme != _SCHEME or len(bytes.fromhex(digest)) != hashlib.sha256().digest_size:
            raise ValueError(scheme)
        return bytes.fromhex(salt), bytes.fromhex(digest)
    except ValueError as error:
        raise AccessError(f"{where} is not a hash, as `kvloom api-key` prints it on its second line") from error
