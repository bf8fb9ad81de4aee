"""Mutual TLS: which clients are accepted, which mistakes stop the start, and what a reload changes."""

import asyncio
import logging
import os
import random
import signal
import socket
import subprocess

import pytest

from kvloom.net.devcerts import issue, make_authority, make_crl, make_files
from kvloom.net.keystore import KeyStore
from kvloom.net.tlsconfig import TlsConfig, TlsError
from kvloom.server.secure.tls import reload_on_sighup, tls_context
from kvloom.writing import write_private
from mindieclient.python.httpclient import MindIEClientException, MindIEHTTPClient
from tests.support.wire.triton import FakeTriton, serving

NUM_HANDSHAKES = int(os.environ.get("KVLOOM_TEST_HANDSHAKES", "60"))
PASSWORD = b"a password for tests"


class Site:
    """A server's files on disk, and the CA that issues client certificates."""

    def __init__(self, folder):
        self.folder = folder
        self.config = make_files(folder)
        self.authority = make_authority("test CA")
        self.revoked = issue(self.authority, "revoked")
        self.good = issue(self.authority, "good")
        self.serve_as(issue(self.authority, "server", ("127.0.0.1",)))
        write_private(self.config.ca_files[0], self.authority.certificate_pem())
        write_private(self.config.crls[0], make_crl(self.authority, (self.revoked,)))
        write_private(folder / "client/ca.pem", self.authority.certificate_pem())

    def serve_as(self, pair):
        store = KeyStore(self.config.keystore_master, self.config.keystore_standby)
        write_private(self.config.cert, pair.certificate_pem())
        write_private(self.config.key, pair.key_pem(PASSWORD))
        write_private(self.config.key_password, store.encrypt(PASSWORD, 1).encode())

    def client_files(self, pair):
        write_private(self.folder / "client/client.pem", pair.certificate_pem())
        write_private(self.folder / "client/client.key.pem", pair.key_pem())
        names = {"ca_certs": "ca.pem", "certfile": "client.pem", "keyfile": "client.key.pem"}
        return {option: str(self.folder / "client" / name) for option, name in names.items()}


@pytest.fixture
def site(tmp_path):
    return Site(tmp_path)


@pytest.fixture
def context(site):
    return tls_context(site.config)


@pytest.fixture
def port(context):
    with serving(FakeTriton().app(), ssl_context_factory=lambda config, default: context) as port:
        yield port


def is_admitted(site, port, pair):
    options = site.client_files(pair)
    with MindIEHTTPClient(f"https://127.0.0.1:{port}", enable_ssl=True, ssl_options=options) as client:
        try:
            return client.is_server_live()
        except MindIEClientException:
            return False


def curl(site, port, *options):
    command = ["curl", "-s", "--cacert", "ca.pem", *options, "-X", "GET", f"https://127.0.0.1:{port}/v2"]
    return subprocess.run(command, cwd=site.folder / "client", capture_output=True, timeout=120)


def clients(site):
    foreign = make_authority("test CA")  # the same name with another key
    return {
        "good": site.good,
        "foreign": issue(foreign, "good"),
        "expired": issue(site.authority, "expired", start_days=-20, num_days=10),
        "revoked": site.revoked,
        "not yet valid": issue(site.authority, "early", start_days=10),
        "a server's": issue(site.authority, "server", ("127.0.0.1",)),
    }


@pytest.mark.parametrize("who", ["good", "foreign", "expired", "revoked", "not yet valid", "a server's"])
def test_only_a_good_client_is_admitted(site, port, who, caplog):
    with caplog.at_level(logging.WARNING, "kvloom.server.secure.tls"):
        assert is_admitted(site, port, clients(site)[who]) is (who == "good")
        done = curl(site, port, "--cert", "client.pem", "--key", "client.key.pem")
    assert (done.returncode == 0 and b"MindIE Server" in done.stdout) is (who == "good")
    assert ("TLS handshake refused" in caplog.text) is (who != "good")


def test_a_client_without_a_certificate_is_refused(site, port):
    assert curl(site, port).returncode != 0
    assert is_admitted(site, port, site.good)


def test_a_stream_to_http_1_0_has_no_chunks_here_either(site, context):
    async def streamed(scope, receive, send):
        await send({"type": "http.response.start", "status": 200})
        await send({"type": "http.response.body", "body": b"data: 1\n\n", "more_body": True})
        await send({"type": "http.response.body"})

    site.client_files(site.good)
    names = ("--cert", "client.pem", "--key", "client.key.pem")
    with serving(streamed, ssl_context_factory=lambda config, default: context) as port:
        assert curl(site, port, *names, "--http1.0", "--raw").stdout == b"data: 1\n\n"
        assert b"\r\n" in curl(site, port, *names, "--raw").stdout, "chunks of HTTP/1.1"


def test_old_protocols_are_refused(site, port):
    site.client_files(site.good)
    names = ("--cert", "client.pem", "--key", "client.key.pem")
    assert curl(site, port, *names, "--tls-max", "1.1").returncode != 0
    assert curl(site, port, *names, "--tls-max", "1.2").returncode == 0


def test_half_open_connections_and_random_handshakes_leave_the_server_serving(site, port):
    rng = random.Random(7)
    half_open = [socket.create_connection(("127.0.0.1", port)) for _ in range(20)]
    for _ in range(NUM_HANDSHAKES):
        with socket.create_connection(("127.0.0.1", port), timeout=120) as sock:
            head = rng.choice([b"\x16\x03\x01", b"\x16\x03\x03\xff\xff", b"GET / HTTP/1.1\r\n", b""])
            sock.sendall(head + rng.randbytes(rng.randrange(400)))
    assert is_admitted(site, port, site.good)
    for sock in half_open:
        sock.close()


def test_reload_changes_new_handshakes_and_keeps_open_connections(site, context, port):
    options = site.client_files(site.good)
    with MindIEHTTPClient(f"https://127.0.0.1:{port}", enable_ssl=True, ssl_options=options) as client:
        stream = client.generate_stream("llama_65b", "hi")
        pieces = [next(stream)]
        KeyStore(site.config.keystore_master, site.config.keystore_standby).rotate(1)
        write_private(site.config.crls[0], make_crl(site.authority, (site.good,)))
        context.reload()
        assert len(pieces + list(stream)) == 12
    assert not is_admitted(site, port, site.good)
    assert is_admitted(site, port, site.revoked)  # no longer revoked


def test_a_reload_with_bad_files_keeps_the_good_ones(site, context, port):
    site.config.cert.write_bytes(b"nothing")
    with pytest.raises(TlsError, match="tlsCert"):
        context.reload()
    assert is_admitted(site, port, site.good)


def _mode(path, mode):
    os.chmod(path, mode)


BAD_FILES = {
    "tlsCert: .* expired": lambda s: s.serve_as(issue(s.authority, "x", ("a",), start_days=-9, num_days=3)),
    "tlsCert: .* valid only from": lambda s: s.serve_as(issue(s.authority, "x", ("a",), start_days=9)),
    "tlsCert: .* cannot be read": lambda s: s.config.cert.unlink(),
    "tlsPk: .* is not the key": lambda s: write_private(s.config.key, s.good.key_pem(PASSWORD)),
    "tlsPk: .* is not encrypted": lambda s: write_private(s.config.key, s.good.key_pem()),
    "tlsPk: .* mode 0644": lambda s: _mode(s.config.key, 0o644),
    "tlsCaFile: .* not the certificate of a CA": lambda s: write_private(
        s.config.ca_files[0], s.good.certificate_pem()
    ),
    "tlsCaFile: .* no certificate": lambda s: write_private(s.config.ca_files[0], b"x"),
    "tlsCaFile: .* must hold": lambda s: write_private(s.config.ca_files[0], b""),
    "tlsCrl: .* no revocation list of": lambda s: write_private(s.config.crls[0], make_crl(make_authority("test CA"))),
    "tlsCrl: .* mode 0666": lambda s: _mode(s.config.crls[0], 0o666),
    "tlsPkPwd: .* is not encrypted": lambda s: write_private(s.config.key_password, PASSWORD),
    "tlsPkPwd: .* no key store": lambda s: KeyStore(s.config.keystore_master, s.config.keystore_standby).erase(),
}


@pytest.mark.parametrize("message", BAD_FILES)
def test_each_bad_file_has_one_clear_message(site, message):
    BAD_FILES[message](site)
    with pytest.raises(TlsError, match=message) as caught:
        tls_context(site.config)
    assert PASSWORD.decode() not in str(caught.value)


def test_a_small_rsa_key_is_refused(site):
    command = "openssl req -x509 -newkey rsa:1024 -nodes -keyout k -out c -subj /CN=x -days 9"
    subprocess.run(command.split(), cwd=site.folder, check=True, capture_output=True)
    config = site.config
    small = TlsConfig(config.ca_files, site.folder / "c", site.folder / "k", None, *(config.keystore_master,) * 2, ())
    with pytest.raises(TlsError, match="1024 bits"):
        tls_context(small)


def test_clients_verify_the_server(site, port):
    options = site.client_files(site.good) | {"ca_certs": str(site.folder / "other.pem")}
    write_private(site.folder / "other.pem", make_authority("other").certificate_pem())
    url = f"https://127.0.0.1:{port}"
    client = MindIEHTTPClient(url, enable_ssl=True, ssl_options=options)
    with client, pytest.raises(MindIEClientException, match="CERTIFICATE_VERIFY_FAILED"):
        client.is_server_live()


def test_sighup_reloads_and_says_when_it_cannot(site, context, caplog):
    async def hang_up():
        reload_on_sighup(context, asyncio.get_running_loop())
        num_told = len(caplog.records)
        os.kill(os.getpid(), signal.SIGHUP)
        while len(caplog.records) == num_told:
            await asyncio.sleep(0.005)

    with caplog.at_level(logging.INFO, "kvloom.server.secure.tls"):
        asyncio.run(hang_up())
        site.config.cert.unlink()
        asyncio.run(hang_up())
    assert [record.levelname for record in caplog.records] == ["INFO", "ERROR"]


def test_a_final_newline_of_the_password_is_no_part_of_it(site):
    """`seceasy_encrypt --encryptFile` reads a file as an editor writes it."""
    store = KeyStore(site.config.keystore_master, site.config.keystore_standby)
    write_private(site.config.key_password, store.encrypt(PASSWORD + b"\n", 1).encode())
    tls_context(site.config)
