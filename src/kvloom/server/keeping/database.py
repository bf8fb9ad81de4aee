"""One SQLite file of responses and conversations, bounded in size and separate for each tenant. Used by one thread.

An entry is a response or a conversation: its body, and its items in order, which are a response's input. A response
that continues another one names it as its parent. Bodies and items are JSON and are not parsed here. Each row has a
seal, a digest of its bytes and of whose they are: what is read under another name than it was stored under is an error.
"""

import hashlib
import os
import sqlite3
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, TypeVar

from kvloom.contract.errors import UserError
from kvloom.server.keeping.limits import Limits

T = TypeVar("T")
Kind = Literal["response", "conversation"]
Item = tuple[str, bytes]  # id, JSON

_APPLICATION_ID, _VERSION = 0x6B766C6D, 2
_MAX_NAMING = 16  # bodies that are looked through for an item
_ROW_BYTES = 200  # approximate size of a row without its body
_SCHEMA = """
CREATE TABLE entries(
  id TEXT PRIMARY KEY, tenant TEXT NOT NULL, kind TEXT NOT NULL, parent TEXT NOT NULL,
  used REAL NOT NULL, num_bytes INTEGER NOT NULL, body BLOB NOT NULL, seal BLOB NOT NULL);
CREATE INDEX entries_used ON entries(used);
CREATE INDEX entries_of ON entries(tenant, used);
CREATE TABLE items(
  owner TEXT NOT NULL REFERENCES entries(id) ON DELETE CASCADE, position INTEGER NOT NULL, id TEXT NOT NULL,
  body BLOB NOT NULL, seal BLOB NOT NULL, PRIMARY KEY(owner, position));
CREATE UNIQUE INDEX items_of ON items(owner, id);
"""
# The SQL function `seal` is _seal; version 1 had no seals.
_ENTRY_SEAL, _ITEM_SEAL = "seal(id, tenant, kind, parent, body)", "seal(owner, position, id, body)"
_FROM_1 = f"""
ALTER TABLE entries ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
ALTER TABLE items ADD COLUMN seal BLOB NOT NULL DEFAULT x'';
UPDATE entries SET seal = {_ENTRY_SEAL};
UPDATE items SET seal = {_ITEM_SEAL};
"""
_CHAIN = f"""
WITH RECURSIVE chain(id, parent, body, is_own, depth) AS (
  SELECT id, parent, body, seal = {_ENTRY_SEAL}, 0 FROM entries
  WHERE id = :id AND tenant = :tenant AND kind = 'response' AND used >= :oldest
  UNION ALL
  SELECT e.id, e.parent, e.body, e.seal = seal(e.id, e.tenant, e.kind, e.parent, e.body), depth + 1
  FROM entries e JOIN chain c ON e.id = c.parent WHERE e.tenant = :tenant AND e.kind = 'response')
SELECT id, parent, body, is_own FROM chain ORDER BY depth
"""


class UnusableFile(UserError):
    """The file cannot be opened, or is not such a database."""


class TooLarge(Exception):
    """An entry would be larger than the limit of the whole store."""


@dataclass(frozen=True, slots=True)
class Entry:
    """A row: a response or a conversation. parent: the id of the response that it continues, or empty."""

    id: str
    tenant: str
    kind: Kind
    body: bytes
    items: Sequence[Item] = ()
    parent: str = ""

    @property
    def num_bytes(self) -> int:
        return _ROW_BYTES + len(self.body) + _size(self.items)


@dataclass(frozen=True, slots=True)
class Page:
    """Selects items of an entry: at most `limit`, after or before a given one in the order asked for."""

    limit: int
    is_ascending: bool = False
    after: str = ""
    before: str = ""


class Database:
    """`now`: seconds since 1970. Every method may raise sqlite3.Error; then it has changed nothing."""

    def __init__(self, path: Path, limits: Limits, now: Callable[[], float]) -> None:
        """Raises UnusableFile."""
        self._limits, self._now = limits, now
        self._db = _opened(path)
        rows = self._db.execute("SELECT tenant, COUNT(*), SUM(num_bytes) FROM entries GROUP BY tenant")
        self._used: dict[str, tuple[int, int]] = {tenant: (count, size) for tenant, count, size in rows}
        with self._db:
            self._make_room()

    def close(self) -> None:
        self._db.close()

    # -- entries

    def put(self, entry: Entry) -> None:
        """Store an entry; for a response this counts as a use of its parents. Raises TooLarge."""
        self._write(lambda: self._insert(entry))

    def put_answer(self, entry: Entry | None, tenant: str, conversation: str, items: Sequence[Item]) -> bool:
        """Store a response, if asked for, and the items that it adds to its conversation: both or neither.

        Returns whether the conversation was there. Raises TooLarge.
        """

        def write() -> bool:
            if entry is not None:
                self._insert(entry)
            return self._append(tenant, conversation, items)

        return self._write(write)

    def body(self, tenant: str, kind: Kind, id: str) -> bytes | None:
        found = self._db.execute(
            f"SELECT body, seal = {_ENTRY_SEAL} FROM entries WHERE id = ? AND tenant = ? AND kind = ? AND used >= ?",
            (id, tenant, kind, self._oldest()),
        ).fetchone()
        return None if found is None else _own(id, *found)

    def set_body(self, tenant: str, kind: Kind, id: str, body: bytes) -> bool:
        """Replace an entry's body. Returns whether there was such an entry. Raises TooLarge."""

        def write() -> bool:
            before = self.body(tenant, kind, id)
            if before is None:
                return False
            seal = "seal(id, tenant, kind, parent, ?1)"
            self._db.execute(f"UPDATE entries SET body = ?1, seal = {seal} WHERE id = ?2", (body, id))
            self._grow(tenant, id, len(body) - len(before))
            return True

        return self._write(write)

    def delete(self, tenant: str, kind: Kind, id: str) -> bool:
        """Remove an entry. Returns whether there was such an entry."""

        def write() -> bool:
            is_there = self._has(tenant, kind, id)
            if is_there:
                self._delete("id = ?", (id,))
            return is_there

        return self._write(write)

    # -- items

    def page(self, tenant: str, kind: Kind, id: str, page: Page) -> tuple[list[bytes], bool] | None:
        """Items, and whether there are more; None without such an entry. Raises LookupError for an unknown item."""
        if not self._has(tenant, kind, id):
            return None
        wheres, values = ["owner = ?"], [id]
        for other, is_behind in ((page.after, True), (page.before, False)):
            if other:
                wheres.append(f"position {'>' if is_behind == page.is_ascending else '<'} ?")
                values.append(self._position(id, other))
        order = "ASC" if page.is_ascending else "DESC"
        rows = self._db.execute(
            f"SELECT body, seal = {_ITEM_SEAL} FROM items WHERE {' AND '.join(wheres)} "
            f"ORDER BY position {order} LIMIT ?",
            (*values, page.limit + 1),
        ).fetchall()
        return [_own(id, *row) for row in rows[: page.limit]], len(rows) > page.limit

    def item(self, tenant: str, kind: Kind, owner: str, id: str) -> bytes | None:
        if not self._has(tenant, kind, owner):
            return None
        found = self._db.execute(
            f"SELECT body, seal = {_ITEM_SEAL} FROM items WHERE owner = ? AND id = ?", (owner, id)
        ).fetchone()
        return None if found is None else _own(id, *found)

    def naming(self, tenant: str, id: str) -> tuple[bytes | None, list[bytes]]:
        """The item that was given under this id, or None; and bodies of responses that hold the id, latest first."""
        rows = self._db.execute(
            f"SELECT id, body, seal = {_ENTRY_SEAL} FROM entries WHERE tenant = ? AND used >= ? AND kind = 'response' "
            f"AND instr(body, ?) ORDER BY used DESC LIMIT {_MAX_NAMING}",
            (tenant, self._oldest(), id.encode()),
        )
        owners = self._db.execute("SELECT owner FROM items WHERE id = ?", (id,)).fetchall()
        kinds: tuple[Kind, ...] = ("response", "conversation")
        given = (self.item(tenant, kind, owner, id) for (owner,) in owners for kind in kinds)
        return next((item for item in given if item is not None), None), [_own(*row) for row in rows]

    def append(self, tenant: str, conversation: str, items: Sequence[Item]) -> bool:
        """Add items to a conversation. Returns whether there was such a conversation. Raises TooLarge."""
        return self._write(lambda: self._append(tenant, conversation, items))

    def remove_item(self, tenant: str, conversation: str, id: str) -> bool:
        """Remove an item of a conversation. Returns whether there was such an item."""

        def write() -> bool:
            body = self.item(tenant, "conversation", conversation, id)
            if body is None:
                return False
            self._db.execute("DELETE FROM items WHERE owner = ? AND id = ?", (conversation, id))
            self._grow(tenant, conversation, -_size([(id, body)]))
            return True

        return self._write(write)

    # -- what came before

    def chain(self, tenant: str, id: str, max_bytes: int) -> tuple[list[tuple[list[bytes], bytes]], bool] | None:
        """(input items, body) of a response and of all its ancestors, latest first; and whether these are all.

        At most about `max_bytes`. None without such a response. Raises LookupError, with its id, when an ancestor is
        gone.
        """
        found: list[tuple[list[bytes], bytes]] = []
        left, parent = max_bytes, ""
        rows = self._db.execute(_CHAIN, {"id": id, "tenant": tenant, "oldest": self._oldest()})
        for entry, before, stored, is_own in rows:
            parent, body = before, _own(entry, stored, is_own)
            items = list(self._items(entry, "ASC"))
            left -= len(body) + sum(map(len, items))
            if left < 0 and found:
                return found, False
            found.append((items, body))
        if parent:
            raise LookupError(parent)
        return (found, True) if found else None

    def latest(self, tenant: str, conversation: str, max_bytes: int) -> tuple[list[bytes], bool] | None:
        """Items of a conversation, latest first, at most about `max_bytes`; and whether these are all."""
        if not self._has(tenant, "conversation", conversation):
            return None
        found: list[bytes] = []
        for body in self._items(conversation, "DESC"):
            max_bytes -= len(body)
            if max_bytes < 0 and found:
                return found, False
            found.append(body)
        return found, True

    # -- inside a transaction

    def _write(self, change: Callable[[], T]) -> T:
        """Run `change` and make the room that it needs, in one transaction."""
        used = dict(self._used)
        try:
            with self._db:
                found = change()
                self._make_room()
                return found
        except BaseException:
            self._used = used
            raise

    def _insert(self, entry: Entry) -> None:
        size, now = entry.num_bytes, self._now()
        self._check(size)
        row = (entry.id, entry.tenant, entry.kind, entry.parent, now, size, entry.body)
        seal = "seal(?1, ?2, ?3, ?4, ?7)"
        self._db.execute(f"INSERT INTO entries VALUES (?1, ?2, ?3, ?4, ?5, ?6, ?7, {seal})", row)
        self._insert_items(entry.id, 0, entry.items)
        self._count(entry.tenant, 1, size)
        if entry.parent:
            chain = {"id": entry.parent, "tenant": entry.tenant, "oldest": 0}
            ids = [(now, row[0]) for row in self._db.execute(_CHAIN, chain).fetchall()]
            self._db.executemany("UPDATE entries SET used = ? WHERE id = ?", ids)

    def _append(self, tenant: str, conversation: str, items: Sequence[Item]) -> bool:
        if not self._has(tenant, "conversation", conversation):
            return False
        (last,) = self._db.execute("SELECT MAX(position) FROM items WHERE owner = ?", (conversation,)).fetchone()
        first = 0 if last is None else last + 1
        self._insert_items(conversation, first, items)
        self._grow(tenant, conversation, _size(items))
        return True

    def _insert_items(self, owner: str, first: int, items: Sequence[Item]) -> None:
        rows = ((owner, first + i, id, body) for i, (id, body) in enumerate(items))
        self._db.executemany("INSERT INTO items VALUES (?1, ?2, ?3, ?4, seal(?1, ?2, ?3, ?4))", rows)

    def _grow(self, tenant: str, id: str, by: int) -> None:
        """Record that an entry was used, and has grown by `by` bytes."""
        (size,) = self._db.execute("SELECT num_bytes FROM entries WHERE id = ?", (id,)).fetchone()
        self._check(size + by)
        self._db.execute("UPDATE entries SET num_bytes = ?, used = ? WHERE id = ?", (size + by, self._now(), id))
        self._count(tenant, 0, by)

    def _check(self, size: int) -> None:
        if size > self._limits.max_bytes:
            raise TooLarge(f"{size} bytes are more than the {self._limits.max_bytes} that are kept in all")

    def _make_room(self) -> None:
        """Remove what is too old, then the oldest entries of the tenant with the largest share, until the rest fits."""
        self._delete("used < ?", (self._oldest(),))
        while self._share(*map(sum, zip((0, 0), *self._used.values(), strict=True))) > 1:
            tenant = max(self._used, key=lambda name: self._share(*self._used[name]))
            self._delete("id = (SELECT id FROM entries WHERE tenant = ? ORDER BY used, rowid LIMIT 1)", (tenant,))

    def _delete(self, where: str, values: tuple[object, ...]) -> None:
        for tenant, size in self._db.execute(f"DELETE FROM entries WHERE {where} RETURNING tenant, num_bytes", values):
            self._count(tenant, -1, -size)

    def _share(self, count: int, size: int) -> float:
        """Share of the limits; above 1 is too much."""
        return max(count / self._limits.max_count, size / self._limits.max_bytes)

    def _count(self, tenant: str, count: int, size: int) -> None:
        before = self._used.pop(tenant, (0, 0))
        if before[0] + count:
            self._used[tenant] = (before[0] + count, before[1] + size)

    def _oldest(self) -> float:
        return self._now() - self._limits.max_age_s

    def _has(self, tenant: str, kind: Kind, id: str) -> bool:
        """Whether there is such an entry, whatever its body."""
        wanted = (id, tenant, kind, self._oldest())
        where = "id = ? AND tenant = ? AND kind = ? AND used >= ?"
        return self._db.execute(f"SELECT 1 FROM entries WHERE {where}", wanted).fetchone() is not None

    def _items(self, owner: str, order: str) -> Iterator[bytes]:
        select = f"SELECT body, seal = {_ITEM_SEAL} FROM items WHERE owner = ? ORDER BY position {order}"
        return (_own(owner, *row) for row in self._db.execute(select, (owner,)))

    def _position(self, owner: str, id: str) -> str:
        found = self._db.execute("SELECT position FROM items WHERE owner = ? AND id = ?", (owner, id)).fetchone()
        if found is None:
            raise LookupError(id)
        position: str = found[0]
        return position


def _size(items: Iterable[Item]) -> int:
    return sum(_ROW_BYTES + len(body) for _, body in items)


def _seal(*parts: str | int | bytes) -> bytes:
    """A digest of a row's names and bytes, each with its length."""
    digest = hashlib.blake2b(digest_size=16)
    for part in parts:
        data = part if isinstance(part, bytes) else str(part).encode()
        digest.update(len(data).to_bytes(8, "little") + data)
    return digest.digest()


def _own(name: str, body: bytes, is_own: int) -> bytes:
    """The body. Raises sqlite3.DatabaseError if it was stored under another name."""
    if not is_own:
        raise sqlite3.DatabaseError(f"what lies under {name} is not what was stored there")
    return bytes(body)


def _opened(path: Path) -> sqlite3.Connection:
    """Locked for this process, and readable by its user only. Raises UnusableFile."""
    try:
        os.close(os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise UnusableFile(f"responseStore: {path} cannot be opened: {error.strerror}") from None
    if not path.is_file():
        raise UnusableFile(f"responseStore: {path} is no plain file")
    try:
        db = sqlite3.connect(path, timeout=0)
        try:
            return _prepared(db, path)
        except BaseException:
            db.close()
            raise
    except sqlite3.Error as error:
        if "locked" in str(error):
            raise UnusableFile(f"responseStore: {path} is in use by another server") from None
        hint = "move it away to begin a new one, or name another file"
        raise UnusableFile(f"responseStore: {path} cannot be used: {error}; {hint}") from None


def _prepared(db: sqlite3.Connection, path: Path) -> sqlite3.Connection:
    for pragma in ("locking_mode = EXCLUSIVE", "journal_mode = WAL", "synchronous = NORMAL", "foreign_keys = ON"):
        db.execute(f"PRAGMA {pragma}").fetchall()
    db.execute("PRAGMA secure_delete = ON").fetchall()  # overwrite deleted data in the file
    db.execute(f"PRAGMA journal_size_limit = {64 << 20}").fetchall()
    db.create_function("seal", -1, _seal, deterministic=True)
    (application,) = db.execute("PRAGMA application_id").fetchone()
    (version,) = db.execute("PRAGMA user_version").fetchone()
    (num_tables,) = db.execute("SELECT COUNT(*) FROM sqlite_master").fetchone()
    if not num_tables:
        marks = f"PRAGMA application_id = {_APPLICATION_ID}; PRAGMA user_version = {_VERSION};"
        db.executescript(f"BEGIN; {_SCHEMA} {marks} COMMIT;")
    elif (application, version) == (_APPLICATION_ID, 1):
        db.executescript(f"BEGIN; {_FROM_1} PRAGMA user_version = {_VERSION}; COMMIT;")
    elif (application, version) != (_APPLICATION_ID, _VERSION):
        raise UnusableFile(f"responseStore: {path} is a database of something else; name another file")
    (problem,) = db.execute("PRAGMA quick_check(1)").fetchone()
    if problem != "ok":
        raise sqlite3.DatabaseError(f"it is damaged ({' '.join(problem.split())[:200]})")
    return db
