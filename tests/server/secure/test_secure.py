"""`kvloom serve` behind mutual TLS and API keys, as a process."""

import json
import signal
import ssl
from pathlib import Path

import httpx
import pytest

from kvloom.net.devcerts import make_files
from kvloom.server.secure.api_keys import hash_key, new_key
from tests.server.run.test_main import mock_config, run_cli
from tests.support.processes import serve
from tests.support.waiting import until

TLS_KEYS = {
    "httpsEnabled": True,
    "tlsCaPath": "security/ca/",
    "tlsCaFile": ["ca.pem"],
    "tlsCert": "security/certs/server.pem",
    "tlsPk": "security/keys/server.key.pem",
    "tlsPkPwd": "security/pass/mindie_server_key_pwd.txt",
    "kmcKsfMaster": "tools/pmt/master/ksfa",
    "kmcKsfStandby": "tools/pmt/standby/ksfb",
    "tlsCrl": "security/certs/server_crl.pem",
}


def tls_config(folder: Path, **changes: object) -> Path:
    """A config.json in `folder`/conf that serves the mock model over mutual TLS."""
    (folder / "conf").mkdir()
    path = mock_config(folder / "conf")
    document = json.loads(path.read_text())
    serve_param = document["OtherParam"]["ServeParam"] | TLS_KEYS | changes
    document["OtherParam"]["ServeParam"] = {key: value for key, value in serve_param.items() if value is not None}
    path.write_text(json.dumps(document))
    return path


def client_context(folder: Path, has_certificate: bool = True) -> ssl.SSLContext:
    context = ssl.create_default_context(cafile=str(folder / "client/ca.pem"))
    if has_certificate:
        context.load_cert_chain(folder / "client/client.pem", folder / "client/client.key.pem")
    return context


def test_only_clients_with_a_certificate_are_answered_and_sighup_takes_new_files(tmp_path):
    make_files(tmp_path)
    with serve("--config", str(tls_config(tmp_path))) as server:
        assert server.url.startswith("https://")
        models = server.url + "/v1/models"
        assert httpx.get(models, verify=client_context(tmp_path)).json()["data"][0]["id"] == "llama_65b"
        with pytest.raises(httpx.HTTPError):
            httpx.get(models, verify=client_context(tmp_path, has_certificate=False))
        old = client_context(tmp_path)
        make_files(tmp_path)
        server.process.send_signal(signal.SIGHUP)

        def is_new() -> bool:
            try:
                return httpx.get(models, verify=client_context(tmp_path)).status_code == 200
            except httpx.HTTPError:
                return False

        until(is_new)
        with pytest.raises(httpx.HTTPError):
            httpx.get(models, verify=old)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"tlsCert": None}, "tlsCert: is required when httpsEnabled is true"),
        ({"tlsCert": "security/nowhere.pem"}, "tlsCert: "),
        ({"tlsCaFile": ["other.pem"]}, "tlsCaFile: "),
    ],
)
def test_a_tls_file_that_is_missing_is_one_line(tmp_path, changes, words):
    make_files(tmp_path)
    result = run_cli("serve", "--config", str(tls_config(tmp_path, **changes)))
    assert result.returncode == 1
    lines = [line for line in result.stderr.splitlines() if " WARNING " not in line]  # lines of the log
    (line,) = [line for line in lines if not line.startswith("loading ")]
    assert words in line


def test_with_api_keys_only_health_is_open(tmp_path):
    key = new_key()
    hashes = tmp_path / "keys"
    hashes.write_text(f"# for tests\n{hash_key(key)}\n")
    with serve("--backend", "fake", "--api-key-file", str(hashes)) as server:
        assert httpx.get(server.url + "/health").status_code == 200
        refused = httpx.get(server.url + "/v1/models")
        assert (refused.status_code, refused.json()["error"]["code"]) == (401, "invalid_api_key")
        assert httpx.get(server.url + "/v1/models", headers={"Authorization": f"Bearer {key}"}).status_code == 200
        assert httpx.get(server.url + "/v1/models", headers={"X-Api-Key": key}).status_code == 200


def test_the_command_makes_a_key_that_its_hash_accepts(tmp_path):
    key, hashed = run_cli("api-key").stdout.split()
    hashes = tmp_path / "keys"
    hashes.write_text(hashed)
    with serve("--backend", "fake", "--api-key-file", str(hashes)) as server:
        assert httpx.get(server.url + "/v1/models", headers={"X-Api-Key": key}).status_code == 200


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--host", "0.0.0.0"], "listens on every network"),
        (["--api-key-file", "/nowhere"], "/nowhere cannot be read"),
    ],
)
def test_a_start_that_would_open_too_wide_is_refused(arguments, words):
    result = run_cli("serve", "--backend", "fake", *arguments)
    assert result.returncode == 1
    assert words in result.stderr
