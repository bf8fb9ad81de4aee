"""Packed weights, kept between starts in files of the user's cache, which processes map read-only and so share.

A file is a page of header, then the packed bytes from DATA_OFFSET on. It is written whole or not at all. When room is
needed the least recently used file goes. The cache is optional: any problem with it costs a log line and the time to
pack again.
"""

import contextlib
import errno
import hashlib
import itertools
import logging
import mmap
import os
import stat
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
import xxhash

from ems.common.folders import cache_folder
from kvloom.checkpoints.fingerprint import fingerprint, identity
from kvloom.contract.errors import BadRequest

log = logging.getLogger(__name__)

FOLDER_VARIABLE, SIZE_VARIABLE = "KVLOOM_WEIGHT_CACHE", "KVLOOM_WEIGHT_CACHE_GB"
OFF = "off"
DATA_OFFSET = 2 << 20  # a huge page, so that data can be mapped in huge pages where the file system has them
_DEFAULT_GB = 20.0
_MAGIC = b"KVLPACK1"
_HEADER_BYTES = 4096
_PIECE_BYTES = 8 << 20
_MADV_POPULATE_READ = 22  # Linux 5.14
_SUFFIX, _PART = ".packed", ".part"
_NUM_SAMPLES, _SAMPLE_BYTES = 64, 4096
_STAMP_LETTERS = 129
_STAMPS = "stamps"  # folder of small files: identity of a model's files -> fingerprint of their bytes
_ABANDONED_S = 3600.0  # an older partial file was left by a process that has ended


class Key(msgspec.Struct, frozen=True):
    """Everything that determines the packed bytes. A file with another key is never used."""

    weights: str  # fingerprint of the model's files
    format: str  # of weights: "w8a8", ...
    isa: str  # instruction set that they are packed for
    recipe: str  # digest of the packing code
    num_threads: int  # number of threads that the weights are laid out for

    @property
    def file_name(self) -> str:
        """Of the file."""
        digest = hashlib.sha256(msgspec.json.encode(self)).hexdigest()
        return f"{self.weights[:12]}-{self.format}-{self.isa}-{digest[:16]}{_SUFFIX}"


class _Header(msgspec.Struct):
    key: Key
    num_bytes: int
    digest: str  # XXH3 of the data
    sample: str  # XXH3 of a page here and there, which every opening looks at
    model: str  # the model's path when it was packed, for people


@dataclass(frozen=True, slots=True)
class Entry:
    """One kept file, for people. `key` is None when the file is damaged."""

    path: Path
    num_bytes: int
    used_s: float  # last use, seconds since the epoch
    model: str = ""
    key: Key | None = None


class KeptWeights:
    """The files of one folder: at most `max_bytes`, and at most half of the disk space that is free or theirs."""

    def __init__(self, folder: Path, max_bytes: int) -> None:
        self.folder, self.max_bytes = folder, max_bytes

    def open(self, key: Key, num_bytes: int) -> mmap.mmap | None:
        """The packed bytes, read-only and shared with other processes; None when there is no valid file.

        Logs nothing about the folder: `keep`, which follows, does.
        """
        try:
            self._check_owner()
        except OSError:
            return None
        try:
            fd = os.open(self.folder / key.file_name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except FileNotFoundError:
            return None
        except OSError as error:
            log.warning("%s: cannot be opened: %s", key.file_name, error.strerror or error)
            return None
        try:
            header = _header_of(fd)
            if header is None or header.key != key or header.num_bytes != num_bytes:
                log.warning(
                    "%s: is damaged, of other weights or not this user's own; the weights are packed again",
                    key.file_name,
                )
                return None
            pages = _mapped(fd, num_bytes)
            with memoryview(pages) as whole:
                sample = _sample_of([whole])
            if sample != header.sample:
                log.warning("%s: holds other weights than it says; they are packed again", key.file_name)
                return None
            with contextlib.suppress(OSError):  # a folder that cannot be written to keeps no order of use
                os.utime(fd)
            return pages
        except OSError as error:
            log.warning("%s: cannot be mapped: %s", key.file_name, error.strerror or error)
            return None
        finally:
            os.close(fd)

    def keep(self, key: Key, pieces: Sequence[memoryview], model: str) -> bool:
        """Write the pieces one after the other. False, with a line in the log, when that fails."""
        num_bytes = sum(len(piece) for piece in pieces)
        part = self.folder / f"{key.file_name}.{os.getpid()}{_PART}"
        try:
            self._make_folder()
            self._make_room(num_bytes + DATA_OFFSET, key)
            try:
                _write(part, key, pieces, model)
                part.replace(self.folder / key.file_name)
            finally:
                part.unlink(missing_ok=True)
        except OSError as error:
            log.warning("%s: packed weights are not kept: %s", self.folder, error.strerror or error)
            return False
        return True

    def fingerprint(self, model: Path) -> str:
        """As fingerprint.fingerprint, but remembered for files that were read once and have not changed since."""
        known = identity(model, time.time())
        if known is None:  # written just now: it may be written again within the same time stamp
            return fingerprint(model)
        stamp = self.folder / _STAMPS / known
        with contextlib.suppress(OSError, ValueError):
            self._check_owner()
            found, proof = stamp.read_text()[:_STAMP_LETTERS].split()
            if proof == _proof(known, found):
                return found
        found = fingerprint(model)
        with contextlib.suppress(OSError):  # `keep` reports a folder that cannot be written to
            self._make_folder()
            stamp.parent.mkdir(mode=0o700, exist_ok=True)
            part = stamp.with_name(f"{stamp.name}.{os.getpid()}{_PART}")
            part.write_text(f"{found} {_proof(known, found)}")
            part.replace(stamp)
        return found

    def entries(self) -> list[Entry]:
        """All kept files, most recently used first. Raises OSError when the folder is not this user's own."""
        if self.folder.exists():
            self._check_owner()
        found = [entry for path in self.folder.glob(f"*{_SUFFIX}") if (entry := _entry_of(path)) is not None]
        return sorted(found, key=lambda entry: -entry.used_s)

    def is_sound(self, entry: Entry) -> bool:
        """Whether the data match their checksum; reads all of them. Raises OSError."""
        hashed = xxhash.xxh3_128()
        with entry.path.open("rb", buffering=0) as file:
            header = _header_of(file.fileno())
            file.seek(DATA_OFFSET)
            while piece := file.read(_PIECE_BYTES):
                hashed.update(piece)
        return header is not None and hashed.hexdigest() == header.digest

    def clear(self) -> int:
        """Remove all files; processes that have them mapped go on. Returns the bytes removed. Raises OSError."""
        entries = self.entries()
        for path in [*(entry.path for entry in entries), *self._parts(0.0), *self.folder.glob(f"{_STAMPS}/*")]:
            path.unlink(missing_ok=True)
        return sum(entry.num_bytes for entry in entries)

    def limit_bytes(self) -> int:
        """Bytes that may be kept now. Raises OSError."""
        disk = os.statvfs(self.folder)
        held = sum(entry.num_bytes for entry in self.entries())
        return min(self.max_bytes, (held + disk.f_bavail * disk.f_frsize) // 2)

    def _make_folder(self) -> None:
        """Raises OSError."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        self._check_owner()

    def _check_owner(self) -> None:
        """Raises PermissionError when another user could have put files there, OSError when there is no folder."""
        status = self.folder.stat()
        if not stat.S_ISDIR(status.st_mode):
            raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR))
        if not _is_own(status):
            raise PermissionError(0, "the folder is not this user's own alone (owner, or mode beyond 0755)")

    def _make_room(self, num_bytes: int, key: Key) -> None:
        """Make room for one more file. Raises OSError when that is not possible."""
        for part in self._parts(time.time() - _ABANDONED_S):
            part.unlink(missing_ok=True)
        limit = self.limit_bytes()
        if num_bytes > limit:
            raise OSError(0, f"{num_bytes >> 20} MiB are more than the {limit >> 20} MiB that may be kept")
        others = [entry for entry in self.entries() if entry.path.name != key.file_name]
        while others and num_bytes + sum(entry.num_bytes for entry in others) > limit:
            others.pop().path.unlink(missing_ok=True)
        kept = {key.weights, *(entry.key.weights for entry in others if entry.key is not None)}
        for stamp in self.folder.glob(f"{_STAMPS}/*"):
            if stamp.read_text().partition(" ")[0] not in kept:
                stamp.unlink(missing_ok=True)

    def _parts(self, before_s: float) -> Iterator[Path]:
        """Partial files older than `before_s`; 0.0 = all."""
        for part in [*self.folder.glob(f"*{_PART}"), *self.folder.glob(f"{_STAMPS}/*{_PART}")]:
            with contextlib.suppress(OSError):
                if not before_s or part.stat().st_mtime < before_s:
                    yield part


def kept_weights(environ: Mapping[str, str], given: str = "") -> KeptWeights | None:
    """The cache that `given` (a folder, or "off"), else the environment, names; None = off.

    Raises BadRequest; OSError for a user without a cache.
    """
    folder = given or environ.get(FOLDER_VARIABLE, "")
    if folder == OFF:
        return None
    text = environ.get(SIZE_VARIABLE) or str(_DEFAULT_GB)
    try:
        num_gb = float(text)
    except ValueError:
        num_gb = -1.0
    if not 0 < num_gb < 1e9:
        raise BadRequest(SIZE_VARIABLE, f"must be a number of gigabytes above 0, got {text!r}")
    root = Path(os.path.expanduser(folder)) if folder else cache_folder(environ) / "packed"
    return KeptWeights(root, int(num_gb * 1e9))


def _proof(known: str, found: str) -> str:
    """Binds a remembered fingerprint to the identity of the files that have it: the memory of others has another."""
    return hashlib.sha256(f"{known} {found}".encode()).hexdigest()


def _sample_of(pieces: Sequence[memoryview]) -> str:
    """XXH3 of _NUM_SAMPLES pages spread over all bytes of the pieces."""
    ends = list(itertools.accumulate(len(piece) for piece in pieces))
    hashed = xxhash.xxh3_128()
    for index in range(_NUM_SAMPLES):
        at = ends[-1] * index // _NUM_SAMPLES
        for piece, end in zip(pieces, ends, strict=True):
            first = end - len(piece)
            if at < end and at + _SAMPLE_BYTES > first:
                hashed.update(piece[max(at - first, 0) : at + _SAMPLE_BYTES - first])
    return hashed.hexdigest()


def _is_own(found: os.stat_result) -> bool:
    return found.st_uid == os.geteuid() and not found.st_mode & 0o022


def _header_of(fd: int) -> _Header | None:
    """The header of an open file, checked to be complete and writable by this user only. Raises OSError."""
    about = os.fstat(fd)
    page = os.pread(fd, _HEADER_BYTES, 0)
    length = int.from_bytes(page[8:12], "little")
    text, digest = page[12 : 12 + length], page[12 + length : 44 + length]
    if not (stat.S_ISREG(about.st_mode) and _is_own(about) and page.startswith(_MAGIC)):
        return None
    if hashlib.sha256(text).digest() != digest:
        return None
    try:
        header = msgspec.json.decode(text, type=_Header)
    except msgspec.DecodeError:
        return None
    return header if about.st_size == DATA_OFFSET + header.num_bytes else None


def _entry_of(path: Path) -> Entry | None:
    """The file's entry; None when it is gone."""
    try:
        fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return None
    try:
        about, header = os.fstat(fd), _header_of(fd)
    except OSError:
        return None
    finally:
        os.close(fd)
    if header is None:
        return Entry(path, about.st_size, about.st_mtime)
    return Entry(path, about.st_size, about.st_mtime, header.model, header.key)


def _write(path: Path, key: Key, pieces: Sequence[memoryview], model: str) -> None:
    """Write a file, durable when this returns: after a power cut a partial one would be taken for complete. Raises
    OSError.
    """
    hashed = xxhash.xxh3_128()
    flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW
    with os.fdopen(os.open(path, flags, 0o600), "wb", buffering=0) as file:
        file.seek(DATA_OFFSET)
        for part in parts_of(pieces, _PIECE_BYTES):
            _write_all(file.fileno(), part)
            hashed.update(part)
        num_bytes = sum(len(piece) for piece in pieces)
        text = msgspec.json.encode(_Header(key, num_bytes, hashed.hexdigest(), _sample_of(pieces), model[-1024:]))
        head = _MAGIC + len(text).to_bytes(4, "little") + text + hashlib.sha256(text).digest()
        os.fsync(file.fileno())
        os.pwrite(file.fileno(), head, 0)
        os.fsync(file.fileno())


def parts_of(pieces: Sequence[memoryview], part_bytes: int) -> Iterator[memoryview]:
    """All bytes in order, cut where a piece ends and at multiples of `part_bytes` from the first byte.

    File systems keep what is written at once, and so aligned, in huge pages.
    """
    position = 0
    for piece in pieces:
        at = 0
        while at < len(piece):
            part = piece[at : at + part_bytes - position % part_bytes]
            yield part
            at, position = at + len(part), position + len(part)


def _mapped(fd: int, num_bytes: int) -> mmap.mmap:
    """The data behind the header, read from disk now, into huge pages where the file system can. Raises OSError."""
    try:
        pages = mmap.mmap(fd, num_bytes, mmap.MAP_SHARED, mmap.PROT_READ, offset=DATA_OFFSET)
        with contextlib.suppress(AttributeError, OSError):
            pages.madvise(mmap.MADV_HUGEPAGE)
        pages.madvise(_MADV_POPULATE_READ)
    except (AttributeError, OSError):
        flags = mmap.MAP_SHARED | getattr(mmap, "MAP_POPULATE", 0)
        return mmap.mmap(fd, num_bytes, flags, mmap.PROT_READ, offset=DATA_OFFSET)
    return pages


def _write_all(fd: int, data: memoryview) -> None:
    while data:
        data = data[os.write(fd, data) :]
