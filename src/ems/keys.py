"""Names and proofs: how a block is named in the pool, and how a client and an agent show that they share a key.

Pure: hashes only. A block's name is 32 bytes of SHA-256 over the tenant's salt, the model, its parallel layout, the
layout of the registered tensors, the caller's hash or token chain, and the number of tokens. Two processes that differ
in any of these never read each other's bytes; the same ones agree after a restart, whatever PYTHONHASHSEED is.
"""

import hmac
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Protocol

import numpy as np
import numpy.typing as npt

KEY_BYTES = 32
NONCE_BYTES = 32
DEFAULT_TENANT = "default"
_SIGN_AND_SIZE = struct.Struct("<BI").pack
_NUM_TOKENS = struct.Struct("<Q").pack
_LENGTHS = struct.Struct("<QQ").pack


@dataclass(frozen=True, slots=True)
class Layout:
    """What makes stored bytes meaningful: element type, tokens a block, shape of one token in each tensor.

    token_shapes: one (heads, head_size) or (dim,) a tensor, layer by layer, K before V.
    """

    dtype: str
    block_size: int
    token_shapes: tuple[tuple[int, ...], ...]
    # for caches with layer groups: each tensor's group, and its tokens a block
    groups: tuple[tuple[int, int], ...] = ()

    def fingerprint(self) -> bytes:
        """32 bytes; differs whenever a stored block would be read differently. Elements are little-endian."""
        text = f"le|{self.dtype}|{self.block_size}|{self.token_shapes!r}"
        text += f"|{self.groups!r}" if self.groups else ""
        return sha256(text.encode()).digest()


@dataclass(frozen=True, slots=True)
class Identity:
    """The model instance and this process's part of it. rank_in_tp is None where all tensor ranks are alike (MLA)."""

    model_id: str
    llm_engine: str
    kvcache_type: str
    tp_world_size: int
    pp_world_size: int
    rank_in_tp: int | None
    rank_in_pp: int


def encode_int(value: int) -> bytes:
    """Any integer, negative or beyond 64 bits, as sign, length and magnitude: no two integers share an encoding."""
    magnitude = abs(value)
    size = (magnitude.bit_length() + 7) >> 3
    return _SIGN_AND_SIZE(value < 0, size) + magnitude.to_bytes(size, "big")


def _encode_str(text: str) -> bytes:
    raw = text.encode()
    return struct.pack("<I", len(raw)) + raw


def _encode_owner(salt: bytes, identity: Identity) -> bytes:
    """The owner in names: the tenant, by its salt, and the model instance."""
    rank_in_tp = -1 if identity.rank_in_tp is None else identity.rank_in_tp
    texts = map(_encode_str, (identity.model_id, identity.llm_engine, identity.kvcache_type))
    numbers = map(encode_int, (identity.tp_world_size, identity.pp_world_size, rank_in_tp, identity.rank_in_pp))
    return b"".join((struct.pack("<I", len(salt)), salt, *texts, *numbers))


class ValueNames:
    """The names of values: bytes under keys of the caller's own, in one layout of one rank for one tenant.

    No value has the name of a block, whatever the keys are.
    """

    def __init__(self, salt: bytes, identity: Identity, layout: str) -> None:
        """layout: the caller's words for how the bytes are to be read."""
        self._base = sha256(b"ems value 1" + _encode_owner(salt, identity) + _encode_str(layout)).digest()

    def of_value(self, key: bytes, length: int) -> bytes:
        """Name of the value of `length` bytes under `key`; another length gives another name."""
        return sha256(self._base + _LENGTHS(len(key), length) + key).digest()


class BatchNames(Protocol):
    """Computes many names of a KeySpace at once. base: the common prefix of their input."""

    def of_hashes(self, base: bytes, values: Sequence[int], counts: "npt.NDArray[np.int64]") -> bytes | None:
        """`KeySpace.of_chunks`; None where it is not supported."""
        ...

    def of_tokens(self, base: bytes, tokens: "npt.NDArray[np.int64]", block_size: int) -> bytes:
        """`KeySpace.of_sequence`."""
        ...


class KeySpace:
    """The names of one registered layout of one rank for one tenant. in_batches: computes many at once; None = one by
    one here.
    """

    def __init__(self, salt: bytes, identity: Identity, layout: Layout, in_batches: BatchNames | None = None) -> None:
        """`hash_base`: prefix of the hash input for blocks whose prefix hash the caller computed."""
        base = sha256(b"ems key 2" + _encode_owner(salt, identity) + layout.fingerprint())
        self.hash_base = base.digest() + b"h"
        self._token_base = base.digest() + b"t"
        self._in_batches = in_batches

    def of_hash(self, block_hash: int, num_tokens: int) -> bytes:
        """Name of the block whose prefix hash the caller computed; any integer."""
        return sha256(self.hash_base + encode_int(block_hash) + _NUM_TOKENS(num_tokens)).digest()

    def of_chunk(self, block_hash: int, lengths: Sequence[int]) -> bytes:
        """Name of a block of a cache in layer groups: its hash, and its tokens in each group. One group = `of_hash`."""
        return sha256(self.hash_base + encode_int(block_hash) + struct.pack(f"<{len(lengths)}Q", *lengths)).digest()

    def of_chunks(self, hashes: Sequence[int], lengths: "npt.NDArray[np.int64]") -> bytes:
        """`of_chunk` of each, packed. lengths [hashes, groups]."""
        packed = self._in_batches.of_hashes(self.hash_base, hashes, lengths) if self._in_batches else None
        return packed if packed is not None else b"".join(map(self.of_chunk, hashes, lengths.tolist()))

    def of_sequence(self, token_ids: "npt.NDArray[np.int64]", block_size: int) -> bytes:
        """`of_tokens`, packed."""
        if self._in_batches:
            return self._in_batches.of_tokens(self._token_base, token_ids, block_size)
        return b"".join(self.of_tokens(token_ids.tolist(), block_size))

    def of_tokens(self, token_ids: Sequence[int], block_size: int) -> Iterator[bytes]:
        """Names of the blocks of a token sequence, the last one possibly short. Tokens are signed 64-bit.

        Each name depends on every token before it, so equal blocks after different prefixes differ.
        """
        previous = b""
        for start in range(0, len(token_ids), block_size):
            block = token_ids[start : start + block_size]
            previous = sha256(
                self._token_base + previous + struct.pack(f"<Q{len(block)}q", len(block), *block)
            ).digest()
            yield previous


def verifier(access_key: str, salt: bytes) -> bytes:
    """What is stored instead of an access key. One keyed hash is enough, because keys are long and random."""
    return hmac.new(salt, b"ems verifier 1" + access_key.encode(), sha256).digest()


def proof(secret: bytes, role: str, access_id: str, client_nonce: bytes, agent_nonce: bytes) -> bytes:
    """Proves knowledge of `secret` for this pair of nonces; `role` keeps a proof from being replayed to its author."""
    message = b"".join((_encode_str(role), _encode_str(access_id), client_nonce, agent_nonce))
    return hmac.new(secret, message, sha256).digest()


def same(left: bytes, right: bytes) -> bool:
    """Constant-time equality."""
    return hmac.compare_digest(left, right)


def derive(secret: bytes, purpose: str, name: str = "") -> bytes:
    """A 32-byte secret for one purpose (a tenant's salt, the key of a peer session), from a longer-lived one."""
    return hmac.new(secret, _encode_str(purpose) + _encode_str(name), sha256).digest()
