"""The database of kept responses: limits, tenants, kill -9, a file of another program, a full disk."""

import asyncio
import os
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvloom.server.keeping.database import Database, Entry, Page, TooLarge, UnusableFile
from kvloom.server.keeping.limits import Limits
from kvloom.server.keeping.store import ResponseStore, StoreFailed

DAY_S = 86400.0


class Clock:
    now_s = 1e9

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def opened(tmp_path: Path, clock: Clock) -> Iterator[Callable[..., Database]]:
    """Closes the store and opens its file again."""
    made: list[Database] = []

    def again(**limits: float) -> Database:
        for database in made:
            database.close()
        made[:] = [Database(tmp_path / "store.db", Limits(**limits), clock)]
        return made[0]

    yield again
    for database in made:
        database.close()


def response(id: str, tenant: str = "a", size: int = 10, parent: str = "") -> Entry:
    items = ((f"{id}-in", b'{"id":"in"}'),)
    return Entry(id, tenant, "response", b"x" * size, items, parent)


def ids(database: Database, names: str, tenant: str = "a") -> str:
    return "".join(name for name in names if database.body(tenant, "response", name) is not None)


def test_what_is_kept_is_there_after_opening_again_and_gone_when_deleted(opened: Callable[..., Database]):
    opened().put(response("r"))
    database = opened()
    assert database.body("a", "response", "r") == b"x" * 10
    assert database.body("a", "conversation", "r") is None
    assert database.delete("a", "response", "r")
    assert not database.delete("a", "response", "r")
    assert opened().body("a", "response", "r") is None
    assert database._used == {}


def exchange(database: Database, table: str, names: str, *ids: str) -> None:
    """Give two rows each other's values of some columns."""
    rows = [database._db.execute(f"SELECT {names} FROM {table} WHERE id = ?", (id,)).fetchone() for id in ids]
    columns = ", ".join(f"{name} = ?" for name in names.split(", "))
    for id, row in zip(ids, reversed(rows), strict=True):
        database._db.execute(f"UPDATE {table} SET {columns} WHERE id = ?", (*row, id))


@pytest.mark.parametrize("names", ["body", "body, seal"])
def test_good_values_under_each_others_names_are_errors_and_can_be_deleted(
    opened: Callable[..., Database], tmp_path: Path, names: str
):
    database = opened()
    database.put(Entry("r", "a", "response", b"of r"))
    database.put(Entry("s", "a", "response", b"of s"))
    exchange(database, "entries", names, "r", "s")
    for id in "rs":
        with pytest.raises(sqlite3.DatabaseError, match=f"what lies under {id} is not what was stored there"):
            database.body("a", "response", id)
        with pytest.raises(sqlite3.DatabaseError):
            database.chain("a", id, 1000)
        assert database.delete("a", "response", id)


def test_items_that_changed_places_are_errors(opened: Callable[..., Database]):
    database = opened()
    database.put(Entry("c", "a", "conversation", b"{}", [("i", b"1"), ("j", b"2")]))
    exchange(database, "items", "body, seal", "i", "j")
    reads: list[Callable[[], object]] = [
        lambda: database.latest("a", "c", 1000),
        lambda: database.page("a", "conversation", "c", Page(10)),
        lambda: database.item("a", "conversation", "c", "i"),
    ]
    for read in reads:
        with pytest.raises(sqlite3.DatabaseError, match="is not what was stored there"):
            read()


def test_a_file_of_the_first_version_is_read_and_written_on(opened: Callable[..., Database], tmp_path: Path):
    database = opened()
    database.put(response("r"))
    database.put(Entry("c", "a", "conversation", b"{}", [("i", b"1")]))
    database._db.executescript(
        "ALTER TABLE entries DROP COLUMN seal; ALTER TABLE items DROP COLUMN seal; PRAGMA user_version = 1;"
    )
    for _ in range(2):
        database = opened()
        assert database.body("a", "response", "r") == b"x" * 10
        assert database.latest("a", "c", 1000) == ([b"1"], True)
    database.put(response("s", parent="r"))
    assert database.append("a", "c", [("j", b"2")])
    assert len(opened().chain("a", "s", 1000)[0]) == 2


def test_tenants_do_not_see_each_other(opened: Callable[..., Database]):
    database = opened()
    database.put(response("r"))
    database.put(Entry("c", "a", "conversation", b"{}", [("i", b"1")]))
    assert database.body("b", "response", "r") is None
    assert database.chain("b", "r", 1000) is None
    assert database.latest("b", "c", 1000) is None
    assert database.page("b", "conversation", "c", Page(10)) is None
    assert database.item("b", "conversation", "c", "i") is None
    assert not database.delete("b", "response", "r")
    assert not database.append("b", "c", [("j", b"2")])
    assert not database.remove_item("b", "c", "i")
    assert not database.set_body("b", "conversation", "c", b"2")
    assert (ids(database, "r"), database.item("a", "conversation", "c", "i")) == ("r", b"1")
    database.put(response("s", "b", parent="r"))
    with pytest.raises(LookupError):  # a response of another tenant as parent
        database.chain("b", "s", 1000)


def test_the_oldest_go_when_there_are_too_many(opened: Callable[..., Database], clock: Clock):
    database = opened(max_count=3)
    for name in "pqrs":
        database.put(response(name))
        clock.now_s += 1
    assert ids(database, "pqrs") == "qrs"
    database.put(response("t", parent="q"))  # which refers to q
    clock.now_s += 1
    database.put(response("u"))
    assert ids(database, "qrstu") == "qtu"


def test_the_oldest_go_when_they_are_too_large(opened: Callable[..., Database]):
    database = opened(max_bytes=10_000)
    for name in "pqrs":
        database.put(response(name, size=3000))
    assert ids(database, "pqrs") == "rs"
    with pytest.raises(TooLarge):
        database.put(response("t", size=10_000))
    assert ids(database, "rs") == "rs"
    assert database._used["a"][0] == 2
    assert opened(max_count=1)._used["a"][0] == 1


def test_whoever_has_most_makes_room(opened: Callable[..., Database], clock: Clock):
    database = opened(max_count=10)
    database.put(response("x", "quiet"))
    for name in "abcdefghijklm":
        clock.now_s += 1
        database.put(response(name, "loud"))
    assert ids(database, "x", "quiet") == "x"
    assert ids(database, "abcdefghijklm", "loud") == "efghijklm"


def test_what_nobody_used_for_long_is_gone(opened: Callable[..., Database], clock: Clock):
    database = opened(max_age_s=DAY_S)
    database.put(response("p"))
    database.put(response("q"))
    clock.now_s += DAY_S / 2
    database.put(response("r", parent="p"))
    clock.now_s += DAY_S * 0.6
    assert ids(database, "pqr") == "pr"
    database.put(response("s"))
    assert database._used["a"][0] == 3
    clock.now_s += DAY_S * 2
    assert opened(max_age_s=DAY_S)._used == {}


def test_a_chain_is_told_latest_first_and_says_who_is_missing(opened: Callable[..., Database]):
    database = opened()
    for name, parent in (("p", ""), ("q", "p"), ("r", "q"), ("s", "q")):
        database.put(response(name, parent=parent))
    item = b'{"id":"in"}'
    assert database.chain("a", "r", 1000) == ([([item], b"x" * 10)] * 3, True)
    assert database.chain("a", "r", 40) == ([([item], b"x" * 10)], False)
    assert database.chain("a", "s", 1000) == database.chain("a", "r", 1000)  # two responses continue q
    database.delete("a", "response", "p")
    with pytest.raises(LookupError, match="p"):
        database.chain("a", "r", 1000)
    assert database.chain("a", "gone", 1000) is None


def test_items_are_paged_in_both_directions(opened: Callable[..., Database]):
    database = opened()
    database.put(Entry("c", "a", "conversation", b"{}", [(name, name.encode()) for name in "abc"]))
    assert database.append("a", "c", [("d", b"d"), ("e", b"e")])

    def page(**how: object) -> tuple[bytes, bool]:
        found = database.page("a", "conversation", "c", Page(2, **how))
        assert found is not None
        return b"".join(found[0]), found[1]

    assert page() == (b"ed", True)
    assert page(after="d") == (b"cb", True)
    assert page(after="b") == (b"a", False)
    assert page(is_ascending=True) == (b"ab", True)
    assert page(is_ascending=True, after="c") == (b"de", False)
    assert page(is_ascending=True, before="b") == (b"a", False)
    assert page(before="d") == (b"e", False)
    with pytest.raises(LookupError):
        page(after="gone")
    assert database.latest("a", "c", 2) == ([b"e", b"d"], False)
    assert database.latest("a", "c", 100) == ([b"e", b"d", b"c", b"b", b"a"], True)


def test_an_answer_and_its_conversation_change_together_or_not_at_all(opened: Callable[..., Database]):
    database = opened(max_bytes=2000)
    database.put(Entry("c", "a", "conversation", b"{}"))
    assert database.put_answer(response("r"), "a", "c", [("i", b"1"), ("j", b"2")])
    assert (ids(database, "r"), database.latest("a", "c", 99)) == ("r", ([b"2", b"1"], True))
    used = dict(database._used)
    with pytest.raises(TooLarge):
        database.put_answer(response("s"), "a", "c", [("k", b"3" * 3000)])
    assert (ids(database, "rs"), database._used) == ("r", used)
    assert not database.put_answer(response("t"), "a", "gone", [("k", b"3")])
    assert ids(database, "t") == "t"
    assert database.remove_item("a", "c", "i")
    assert database.latest("a", "c", 99) == ([b"2"], True)


def test_a_file_of_something_else_and_a_damaged_one_are_refused(tmp_path: Path):
    other = tmp_path / "other.db"
    with sqlite3.connect(other) as db:
        db.execute("CREATE TABLE t(a)")
    db.close()
    with pytest.raises(UnusableFile, match="is a database of something else"):
        ResponseStore(other)
    noise = tmp_path / "noise.db"
    noise.write_bytes(b"no database at all" * 500)
    with pytest.raises(UnusableFile, match="cannot be used: file is not a database; move it away"):
        ResponseStore(noise)
    assert noise.read_bytes().startswith(b"no database")
    with pytest.raises(UnusableFile, match="cannot be opened: No such file or directory"):
        ResponseStore(tmp_path / "nowhere" / "a.db")
    os.mkfifo(tmp_path / "pipe")
    for path, problem in (
        (tmp_path / "pipe", "is no plain file"),
        (Path("/dev/null"), "is no plain file"),
        (Path("/proc/self/mem"), "cannot be used: disk I/O error; move it away"),
    ):
        with pytest.raises(UnusableFile, match=f"responseStore: {path} {problem}"):
            ResponseStore(path)
    torn = tmp_path / "torn.db"
    store = ResponseStore(torn)
    for i in range(200):
        asyncio.run(store.do(Database.put, response(f"r{i}", size=3000)))
    store.close()
    data = bytearray(torn.read_bytes())
    data[100_000:140_000] = b"\xff" * 40_000
    torn.write_bytes(data)
    with pytest.raises(UnusableFile, match="move it away to begin a new one"):
        ResponseStore(torn)


def test_one_server_a_file_and_nobody_else_reads_it(tmp_path: Path):
    path = tmp_path / "store.db"
    store = ResponseStore(path)
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        with pytest.raises(UnusableFile, match="is in use by another server"):
            ResponseStore(path)
    finally:
        store.close()
    ResponseStore(path).close()


KILLED = """
import asyncio, sys
from pathlib import Path
from kvloom.server.keeping.database import Database, Entry
from kvloom.server.keeping.store import ResponseStore
async def main():
    store = ResponseStore(Path(sys.argv[1]))
    for i in range(10_000):
        await store.do(Database.put, Entry(f"r{i}", "a", "response", b"x" * 2000, [(f"i{i}", b"y")]))
        print(i, flush=True)
asyncio.run(main())
"""


def test_what_was_kept_before_kill_9_is_there(tmp_path: Path):
    path = tmp_path / "store.db"
    with subprocess.Popen([sys.executable, "-c", KILLED, path], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            if int(line) == 50:
                os.kill(process.pid, signal.SIGKILL)
                break
        last = max([50, *map(int, process.stdout.read().split())])
    store = ResponseStore(path)
    try:
        for i in range(last + 1):
            assert asyncio.run(store.do(Database.body, "a", "response", f"r{i}")) == b"x" * 2000
            assert asyncio.run(store.do(Database.item, "a", "response", f"r{i}", f"i{i}")) == b"y"
    finally:
        store.close()


def test_a_full_disk_is_told_and_what_was_kept_stays(tmp_path: Path):
    store = ResponseStore(tmp_path / "store.db")
    try:
        asyncio.run(store.do(Database.put, response("r")))
        asyncio.run(store.do(_fill))
        with pytest.raises(StoreFailed, match="database or disk is full"):
            asyncio.run(store.do(Database.put, response("s", size=10**6)))
        assert asyncio.run(store.do(Database.body, "a", "response", "r")) == b"x" * 10
        assert asyncio.run(store.do(lambda database: database._used["a"][0])) == 1
    finally:
        store.close()


def _fill(database: Database) -> None:
    """Makes SQLite fail as it does on a full disk."""
    database._db.execute("PRAGMA max_page_count = 20").fetchall()
