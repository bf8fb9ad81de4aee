"""Snapshots: a folder that keeps a node's blocks between an orderly shutdown and the next start.

One file for each tenant: a header, then a record and the bytes of each block, prefixes first. Every block's seal is
verified before it is published, so a damaged file costs blocks and nothing else. A file is read once and removed, so
that blocks evicted or revoked later do not come back; what of it was not read yet at a shutdown is kept. Only its owner
can read it; it holds blocks unencrypted.
"""

import hashlib
import logging
import os
import shutil
import struct
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

import xxhash

from ems.keys import KEY_BYTES
from kvloom.pool.node import Node
from kvloom.pool.storage.entries import NoRoom, Reservation, Written
from kvloom.pool.storage.pool import Pool
from kvloom.pool.storage.seals import sealed

log = logging.getLogger(__name__)
_MAGIC = b"EMSSNAP2"
_EARLIER = b"EMSSNAP1"  # its records do not prove whose their bytes are
_HEADER = struct.Struct("<8s32sH")  # magic, digest of the tenant's key salt, length of the tenant's name that follows
_RECORD = struct.Struct("<32s32s16sIB")  # key, parent's key or zeros, seal, length, whether of the read cache
_NO_PARENT = bytes(KEY_BYTES)


class _Record(NamedTuple):
    key: bytes
    parent: bytes
    seal: bytes
    length: int
    is_rcache: bool


class Snapshots:
    """Owned by the agent; `restore` may run while sessions save and load."""

    def __init__(self, folder: Path) -> None:
        """Makes the folder, for its owner only. Raises ValueError when nothing can be written there."""
        try:
            folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            with tempfile.TemporaryFile(dir=folder):
                pass
        except OSError as error:
            raise ValueError(f"--snapshot-dir: {folder} cannot be written to: {error.strerror}") from error
        self._folder = folder
        self._is_closing = False
        self._reading = threading.Lock()  # held by `restore`
        # files that are not used up -> where their first unread record begins
        self._unread = dict.fromkeys((path for path in sorted(folder.glob("*.ems")) if path.is_file()), 0)

    def write(self, node: Node) -> int:
        """Write all blocks of all tenants. Returns how many; what cannot be written is logged and left out."""
        self._is_closing = True  # ends a running restore
        with self._reading:
            return sum(self._write_one(node, pool) for pool in node.pools())

    def _write_one(self, node: Node, pool: Pool) -> int:
        path = self._path(pool.tenant)
        fresh = path.with_suffix(".new")
        try:
            with open(os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb", 1 << 20) as file:
                count = _write_pool(file, pool, _salt_digest(node, pool.tenant))
                self._copy_unread(path, file, node)
            fresh.replace(path)
        except OSError as error:
            log.warning("the snapshot of tenant %s was not written: %s", pool.tenant, error)
            _remove(fresh)
            return 0
        return count

    def _copy_unread(self, path: Path, to: BinaryIO, node: Node) -> None:
        """Append the records of an earlier file that were not read yet."""
        if path not in self._unread:
            return
        with path.open("rb") as file:
            try:
                is_ours = _read_header(file, node) is not None
            except ValueError as error:
                log.warning("the snapshot %s was not used up: %s", path, error)
                return
            if is_ours:
                file.seek(max(self._unread[path], file.tell()))
                shutil.copyfileobj(file, to, 1 << 20)

    def restore(self, node: Node) -> int:
        """Publish the blocks of all files as far as there is room, then remove the files. Returns how many."""
        count = 0
        with self._reading:
            for path in list(self._unread):
                if self._is_closing:
                    break
                try:
                    with path.open("rb", 1 << 20) as file:
                        count += self._restore_file(path, file, node)
                except (OSError, ValueError) as error:
                    log.warning("the snapshot %s was not used up: %s", path, error)
                if not self._is_closing:
                    _remove(path)
                    del self._unread[path]
        return count

    def _restore_file(self, path: Path, file: BinaryIO, node: Node) -> int:
        tenant = _read_header(file, node)
        if tenant is None:
            return 0
        pool, count = node.pool(tenant), 0
        for record, data in _records(file, pool.geometry.slab_bytes):
            usage = pool.usage()
            if self._is_closing or usage["used_bytes"] + record.length > usage["quota_bytes"]:
                break
            count += _publish(pool, record, data)
            self._unread[path] = file.tell()
        return count

    def _path(self, tenant: str) -> Path:
        return self._folder / f"{hashlib.sha256(tenant.encode()).hexdigest()[:32]}.ems"


def _remove(path: Path) -> None:
    try:
        path.unlink(missing_ok=True)
    except OSError as error:
        log.warning("the snapshot %s cannot be removed: %s", path, error.strerror)


def _salt_digest(node: Node, tenant: str) -> bytes:
    return hashlib.sha256(node.key_salt(tenant)).digest()


def _write_pool(file: BinaryIO, pool: Pool, salt_digest: bytes) -> int:
    name = pool.tenant.encode()
    file.write(_HEADER.pack(_MAGIC, salt_digest, len(name)) + name)
    count = 0
    for key in pool.block_keys():
        (entry,) = pool.pin_each([key])
        if entry is not None:
            parent = entry.parent_key or _NO_PARENT
            file.write(_RECORD.pack(key, parent, sealed(key, entry.checksum), entry.length, entry.is_rcache))
            file.write(pool.view(entry.offset, entry.length).data)
            pool.unpin([entry])
            count += 1
    return count


def _read_header(file: BinaryIO, node: Node) -> str | None:
    """The tenant; None when the blocks have other names, because the cluster's secret has changed."""
    head = file.read(_HEADER.size)
    if len(head) != _HEADER.size:
        raise ValueError("it has no header")
    magic, salt_digest, length = _HEADER.unpack(head)
    if magic == _EARLIER:
        raise ValueError("an earlier version wrote it")
    if magic != _MAGIC:
        raise ValueError("it is not a snapshot")
    tenant = file.read(length).decode()
    return tenant if salt_digest == _salt_digest(node, tenant) else None


def _records(file: BinaryIO, max_bytes: int) -> Iterator[tuple[_Record, bytes]]:
    """Blocks up to the end of the file, or to the first invalid record."""
    while len(head := file.read(_RECORD.size)) == _RECORD.size:
        key, parent, seal, length, is_rcache = _RECORD.unpack(head)
        if not 0 < length <= max_bytes or is_rcache > 1:
            raise ValueError("a record makes no sense")
        data = file.read(length)
        if len(data) < length:
            raise ValueError("it ends within a block")
        yield _Record(key, parent, seal, length, bool(is_rcache)), data


def _publish(pool: Pool, record: _Record, data: bytes) -> bool:
    """False when the seal does not match, the block is already there, or there is no room."""
    checksum = xxhash.xxh3_128_digest(data)
    if sealed(record.key, checksum) != record.seal:
        return False
    begun = pool.begin(record.key, record.length, record.is_rcache)
    if isinstance(begun, NoRoom):
        return False
    if not isinstance(begun, Reservation):
        pool.unpin([begun])
        return False
    pool.view(begun.offset, begun.length)[:] = memoryview(data)
    parent = b"" if record.parent == _NO_PARENT else record.parent
    pool.unpin([pool.publish(Written(begun, checksum, parent)).entry])
    return True
