"""Spec 3.4.1 and 3.5.1: the key store, its two files, and its commands."""

import io
import os

import pytest

from kvloom.net.devcerts import make_files
from kvloom.net.keystore import KeyStore, KeyStoreError
from kvloom.server.secure.keystore.commands import config_tls, seceasy_encrypt


@pytest.fixture
def paths(tmp_path):
    return tmp_path / "m/ksfa", tmp_path / "s/ksfb"


@pytest.fixture
def store(paths):
    return KeyStore(*paths)


def test_a_secret_comes_back_and_is_not_in_any_file(store, paths):
    text = store.encrypt(b"correct horse", 1)
    assert store.decrypt(text) == b"correct horse"
    assert b"correct horse" not in text.encode() + paths[0].read_bytes()
    assert [path.stat().st_mode & 0o777 for path in paths] == [0o600, 0o600]


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("damage", ["bytes", "empty", "missing"])
def test_one_damaged_file_is_repaired_from_the_other(store, paths, which, damage):
    text = store.encrypt(b"x", 1)
    good = paths[which].read_bytes()
    if damage == "missing":
        paths[which].unlink()
    else:
        paths[which].write_bytes(good.replace(b'"master_key": "', b'"master_key": "A') if damage == "bytes" else b"")
    assert store.decrypt(text) == b"x"
    assert paths[which].read_bytes() == good


def test_both_damaged_is_an_error_and_nothing_is_overwritten(store, paths):
    text = store.encrypt(b"x", 1)
    for path in paths:
        path.write_bytes(b"{}")
    for action in (lambda: store.decrypt(text), lambda: store.encrypt(b"y", 1), lambda: store.rotate(1)):
        with pytest.raises(KeyStoreError, match="both key store files are damaged"):
            action()
    assert paths[0].read_bytes() == b"{}"


def test_after_a_crash_between_the_two_writes_the_newer_file_counts(store, paths):
    store.encrypt(b"x", 1)
    old = paths[1].read_bytes()
    store.rotate(1)
    text = store.encrypt(b"y", 1)
    paths[1].write_bytes(old)
    assert store.decrypt(text) == b"y"
    assert paths[1].read_bytes() == paths[0].read_bytes()


def test_rotation_keeps_old_texts_readable(store):
    texts = []
    for _ in range(5):
        texts.append(store.encrypt(b"x", 1))
        store.rotate(1)
    assert [store.decrypt(text) for text in texts] == [b"x"] * 5
    assert len({text.split(":")[2] for text in texts}) == 5


def test_a_store_that_others_can_read_is_refused(store, paths):
    store.encrypt(b"x", 1)
    os.chmod(paths[0], 0o640)
    with pytest.raises(KeyStoreError, match="0600"):
        store.encrypt(b"x", 1)


@pytest.mark.parametrize(
    "change", [lambda t: t[:-8] + "AAAAAAA=", lambda t: t.replace(":1:1:", ":1:2:"), lambda t: "x"]
)
def test_a_changed_text_is_refused(store, change):
    text = store.encrypt(b"some secret", 1)
    with pytest.raises(KeyStoreError):
        store.decrypt(change(text))


def test_erased_keys_are_gone(store, paths):
    text = store.encrypt(b"x", 1)
    assert store.erase() == 2
    assert not any(path.exists() for path in paths)
    with pytest.raises(KeyStoreError, match="no key store"):
        store.decrypt(text)


def test_the_command_of_the_seed(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    store = KeyStore(tmp_path / "tools/pmt/master/ksfa", tmp_path / "tools/pmt/standby/ksfb")
    assert seceasy_encrypt(["--encrypt", "1", "2"]) == 0
    text = capsys.readouterr().out.strip()
    (tmp_path / "file").write_bytes(b"content")
    assert seceasy_encrypt(["--encryptFile", "1", "2", "file"]) == 0
    assert seceasy_encrypt(["--encryptFile", "1", "2", "file"]) == 1
    assert seceasy_encrypt(["--activeKey", "1", "2"]) == 0
    assert store.decrypt(text) == b"secret"
    assert store.decrypt((tmp_path / "file").read_text()) == b"content"
    assert seceasy_encrypt(["--secureEraseAllKeystore", "2"]) == 0
    assert seceasy_encrypt(["--activeKey", "1", "2"]) == 1
    assert "secret" not in "".join(capsys.readouterr())


@pytest.mark.parametrize("slot", [("2", "2"), ("x", "2"), ("-1", "2"), ("1", "2000")])
def test_domains_are_checked(tmp_path, monkeypatch, capsys, slot):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.stdin", io.StringIO("secret\n"))
    if slot[0] != "-1":  # argparse itself refuses it
        assert seceasy_encrypt(["--encrypt", *slot]) == 1
        assert "domainId" in capsys.readouterr().err


def test_config_tls_checks_the_password_on_the_key(tmp_path, monkeypatch, capsys):
    paths = make_files(tmp_path)
    password = KeyStore(paths.keystore_master, paths.keystore_standby).decrypt(paths.key_password.read_text())
    paths.key_password.unlink()
    monkeypatch.setattr("sys.stdin", io.StringIO("wrong\n"))
    assert config_tls([str(tmp_path)]) == 1
    assert not paths.key_password.exists()
    monkeypatch.setattr("sys.stdin", io.StringIO(password.decode() + "\n"))
    assert config_tls([str(tmp_path)]) == 0
    assert KeyStore(paths.keystore_master, paths.keystore_standby).decrypt(paths.key_password.read_text()) == password
