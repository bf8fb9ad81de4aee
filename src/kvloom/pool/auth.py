"""Keyring: which access keys open which tenant's pool. Holds verifiers, never keys."""

import ctypes
import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from ems.common.text import is_text
from ems.keys import DEFAULT_TENANT, derive, proof, same, verifier
from kvloom.reading import read_text
from kvloom.writing import write_private

log = logging.getLogger(__name__)

_QUIET_S = 1.0
_MAX_TENANT = 512  # characters of a name


def problem_of_tenant(name: str) -> str:
    """What is wrong with a tenant's name; "" when it will do. It is part of files, metrics and other stores' keys."""
    is_fit = 1 <= len(name) <= _MAX_TENANT and is_text(name)
    return "" if is_fit else f"must be 1 to {_MAX_TENANT} characters that UTF-8 can carry"


@dataclass(frozen=True, slots=True)
class Credential:
    """An access id, its tenant, and the verifiers of its keys: two while a rotation overlaps."""

    access_id: str
    tenant: str
    salt: bytes
    verifiers: tuple[bytes, ...]

    def to_json(self) -> dict[str, object]:
        return {
            "access_id": self.access_id,
            "tenant": self.tenant,
            "salt": self.salt.hex(),
            "verifiers": [each.hex() for each in self.verifiers],
        }

    @classmethod
    def from_json(cls, body: dict[str, object]) -> "Credential":
        """Raises ValueError when a field is missing or has a wrong type."""
        try:
            raw = body["verifiers"]
            if not isinstance(raw, list):
                raise TypeError("verifiers is no list")
            verifiers = tuple(bytes.fromhex(each) for each in raw)
            return cls(str(body["access_id"]), str(body["tenant"]), bytes.fromhex(str(body["salt"])), verifiers)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a credential: {error!r}") from None


def new_credential(access_id: str, tenant: str, access_key: str) -> Credential:
    """A credential with a fresh salt."""
    salt = secrets.token_bytes(16)
    return Credential(access_id, tenant, salt, (verifier(access_key, salt),))


def read_credentials(path: Path) -> list[Credential]:
    """Credentials of a JSON file: a list of what `Credential.to_json` gives. Raises OSError or ValueError."""
    try:
        body = json.loads(read_text(path))
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{path}: {error}") from None
    if not isinstance(body, list):
        raise ValueError(f"{path}: expected a list of credentials")
    found = [Credential.from_json(each) for each in body]
    for each in found:
        if problem := problem_of_tenant(each.tenant):
            raise ValueError(f"{path}: the tenant of {each.access_id!r} {problem}")
    return found


def write_credentials(path: Path, credentials: Iterable[Credential]) -> None:
    """What `read_credentials` reads. Raises OSError."""
    write_private(path, json.dumps([each.to_json() for each in credentials], indent=1).encode() + b"\n")


class Keyring:
    """Credentials of a node, replaced as a whole when the control plane sends others. Any thread may call."""

    def __init__(self, is_open: bool, secret: bytes) -> None:
        """is_open: every client is the default tenant, without a key. secret: the cluster's."""
        self.is_open = is_open
        self._secret = secret
        self._lock = threading.Lock()
        self._credentials: dict[str, Credential] = {}
        self.version = ctypes.c_uint64()  # incremented with every replacement; C++ reads it

    def replace(self, credentials: Iterable[Credential]) -> None:
        """Only these credentials are valid from now on; sessions of others end at their next request."""
        fresh = {each.access_id: each for each in credentials}
        with self._lock:
            self._credentials = fresh
            self.version.value += 1

    def salt(self, access_id: str) -> bytes:
        """The salt of a challenge. An unknown id gets a constant salt of its own, so that nobody learns which ids
        exist.
        """
        if self.is_open:
            return b""
        with self._lock:
            found = self._credentials.get(access_id)
        return found.salt if found else derive(self._secret, "unknown access id", access_id)[:16]

    def open(self, access_id: str, claim: bytes, client_nonce: bytes, agent_nonce: bytes) -> tuple[str, bytes] | None:
        """Tenant and verifier of a client whose proof is right, else None."""
        if self.is_open:
            return DEFAULT_TENANT, verifier("", b"")
        with self._lock:
            found = self._credentials.get(access_id)
        if found is None:
            return None
        for candidate in found.verifiers:
            if same(claim, proof(candidate, "client", access_id, client_nonce, agent_nonce)):
                return found.tenant, candidate
        return None

    def is_valid(self, access_id: str, used: bytes) -> bool:
        """Whether a session that was opened with verifier `used` may go on."""
        if self.is_open:
            return True
        with self._lock:
            found = self._credentials.get(access_id)
        return found is not None and used in found.verifiers


class RefusedLogins:
    """Counts and logs failed logins: at most one line a second, with the number of those left out."""

    def __init__(self, what: str, now: Callable[[], float] = time.monotonic) -> None:
        self.count = 0
        self._what = what
        self._now = now
        self._told = 0
        self._next_s = 0.0
        self._lock = threading.Lock()

    def note(self, who: str) -> None:
        """who: for people, in the log."""
        with self._lock:
            self.count += 1
            now_s = self._now()
            if now_s < self._next_s:
                return
            others, self._told, self._next_s = self.count - self._told - 1, self.count, now_s + _QUIET_S
        log.warning("%s was refused: %s%s", self._what, who, f" ({others} more were)" if others else "")


def node_token(secret: bytes) -> str:
    """The token of this cluster's nodes at the control plane."""
    return derive(secret, "node token").hex()
