"""An untrusted service gets only the files that the app named, and nothing at all if it runs as another user."""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from kvloom.gewu.codes import Code
from tests.support.gewu.daemons import ABI, Client, compile_with_library
from tests.support.gewu.service import Peer, Service

SANITIZERS = ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")
NOBODY = 65534

FOREIGN = """
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[1])
os.setuid(int(sys.argv[2]))
listener.listen()
print("listening", flush=True)
print(listener.accept()[0].recv(100), flush=True)
"""


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "id_rsa"
    path.write_text("secret")
    return path


@pytest.mark.parametrize("op", ["o", "O", "F", "C"])
def test_a_service_that_asks_for_a_path_gets_none(op, model, secret, tmp_path):
    """Two tries of a Create pass a descriptor of the model each, whatever path the service asks for; no try follows."""
    passed: list[list[int]] = []

    def script(peer: Peer) -> None:
        peer.greet()
        frame = peer.expect("C")
        peer.send(op, frame.a, payload=str(secret).encode())
        assert peer.rest() == []
        passed.append([os.fstat(fd).st_ino for fd in peer.fds])

    service = Service(tmp_path / "gewu.sock", script)
    client = Client(service)
    assert client.call("create", json.dumps({"model": str(model)}))[0] == Code.NOSYS
    service.join()
    assert passed == [[model.stat().st_ino]] * 2
    client.close()
    service.close()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can start a service as another user")
def test_another_user_s_service_hears_nothing(model, tmp_path, capfd):
    path = tmp_path / "gewu.sock"
    command = [sys.executable, "-c", FOREIGN, str(path), str(NOBODY)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as foreign:
        assert foreign.stdout is not None
        assert foreign.stdout.readline() == "listening\n"
        client = Client(SimpleNamespace(environ={**os.environ, "GEWU_SOCKET": str(path), "GEWU_LOG": "1"}))
        assert client.call("create", json.dumps({"model": str(model)}))[0] == Code.NOSYS
        assert foreign.stdout.readline() == "b''\n"
        client.close()
    assert f"user {NOBODY} listens on {path}, which is neither this user nor root" in capfd.readouterr().err


@pytest.fixture(scope="module")
def opener() -> Path:
    return compile_with_library(ABI / "models.c", *SANITIZERS)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files with awkward names; one is named "model", like the JSON key."""
    found = tmp_path_factory.mktemp("names")
    for name in (
        "plain",
        'quo"te',
        "back\\slash",
        "tab\there",
        "Modell-äöü",
        "模型",
        "🧠",
        "a/b".replace("/", "∕"),
        "model",
    ):
        (found / name).touch()
    return found


def opened(opener: Path, folder: Path, texts: list[str]) -> list[int]:
    """The inode of the file that the library opens for each of these attributes; 0 if it opens none."""
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(text.encode() + b"\0" for text in texts))
        file.flush()
        done = subprocess.run([opener, file.name], cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [int(line) for line in done.stdout.split()]


def test_the_path_is_the_one_that_the_app_named(opener, folder):
    """It is the path that a JSON parser finds, for every spelling and every surrounding text."""
    texts, expected = [], []
    for file in sorted(folder.iterdir()):
        for path in (str(file), file.name):
            around = {"a": "model", "b": {"model": "plain"}, "c": ["model", {"model": "plain"}], "\\": '"}{'}
            for escaped in (True, False):
                texts.append(json.dumps({**around, "model": path, "z": "}{]["}, ensure_ascii=escaped, indent=1))
                texts.append(json.dumps({"model": path}, ensure_ascii=escaped).replace("/", "\\/"))
                texts.append(f'{{"model": "plain", "m\\u006fdel" :\n{json.dumps(path, ensure_ascii=escaped)}}}')
                expected += [file.stat().st_ino] * 3
    assert opened(opener, folder, texts) == expected


@pytest.mark.parametrize(
    "text",
    [
        "",
        "plain",
        '"plain"',
        '{"model"',
        '{"model":',
        '{"model": "plain',
        '{"model": "plain\\',
        '{"model": "plain\\u00',
        '{"model": "\\ud83e"}',
        '{"model": "\\udde0\\ud83e"}',
        '{"model": "\\u0000plain"}',
        '{"model": "pl\\xain"}',
        '{"model": 1}',
        '{"model": "plain", "model": null}',
        '{"settings": {"model": "plain"}}',
        '{"model ": "plain"}',
        '{"model": "/nowhere"}',
    ],
)
def test_what_names_no_file_opens_none(text, opener, folder):
    assert opened(opener, folder, [text]) == [0]


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=9) | st.sampled_from(["model", "plain"]),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5) | st.just("model"), inner, max_size=3)
    ),
    max_leaves=12,
)


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    st.lists(
        st.tuples(st.dictionaries(st.text(max_size=5) | st.just("model"), JSON, max_size=4), st.booleans()), max_size=40
    )
)
def test_any_attributes_open_what_a_json_parser_finds(opener, folder, documents):
    names = {file.name: file.stat().st_ino for file in folder.iterdir()}
    texts = [json.dumps(value, ensure_ascii=escaped) for value, escaped in documents]
    is_sendable = [not any(0xD800 <= ord(c) < 0xE000 for c in text) for text in texts]
    texts = [text for text, is_good in zip(texts, is_sendable, strict=True) if is_good]
    for text, inode in zip(texts, opened(opener, folder, texts) if texts else [], strict=True):
        model = json.loads(text).get("model")
        if isinstance(model, str) and model in names:
            assert inode == names[model]
        elif not isinstance(model, str):
            assert inode == 0


@settings(max_examples=20, deadline=None)
@given(texts=st.lists(st.text(alphabet='{}[]":,\\ umodel0plaindb', max_size=60), max_size=100))
def test_no_text_makes_the_library_read_past_its_end(opener, folder, texts):
    assert len(opened(opener, folder, [text + "!" for text in texts])) == len(texts)
