"""Embeddings of MiniLM's real weights beside sentence-transformers'; `make compat` has both."""

import zipfile
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest

from tests.support.processes import ServeProcess, serve

sentence_transformers = pytest.importorskip("sentence_transformers", reason="run by `make compat`")
minilm = pytest.importorskip("all_minilm_l6_v2", reason="run by `make compat`")

pytestmark = [pytest.mark.compat, pytest.mark.filterwarnings("ignore")]
TEXTS = [
    "The sea is calm.",
    "How do I sort a list in Python?",
    "a",
    "[CLS] in [MASK] [SEP]",
    "naïve café 東京",
    "word " * 200,
]
LONG = "word " * 400  # the model's folder says 256 tokens


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("minilm")
    with zipfile.ZipFile(Path(minilm.__file__).with_name("model.zip")) as packed:
        packed.extractall(path)
    return path


@pytest.fixture(scope="module", params=[["--backend", "torch", "--dtype", "float32"], []], ids=["float32", "kernels"])
def server(folder: Path, request: pytest.FixtureRequest) -> Iterator[tuple[ServeProcess, float]]:
    with serve(str(folder), "--served-model-name", "minilm", *request.param) as running:
        yield running, 1e-5 if request.param else 2e-3


@pytest.fixture(scope="module")
def reference(folder: Path):
    return sentence_transformers.SentenceTransformer(str(folder))


def test_embeddings_are_those_of_sentence_transformers(server: tuple[ServeProcess, float], reference):
    running, tolerance = server
    answer = httpx.post(f"{running.url}/v1/embeddings", json={"model": "minilm", "input": TEXTS}).json()
    got = np.array([one["embedding"] for one in answer["data"]])
    assert np.abs(got - reference.encode(TEXTS)).max() < tolerance


def test_a_text_that_is_too_long_is_refused_or_cut_as_there(server: tuple[ServeProcess, float], reference):
    running, tolerance = server
    refused = httpx.post(f"{running.url}/v1/embeddings", json={"model": "minilm", "input": LONG})
    assert refused.status_code == 400
    assert "256" in refused.json()["error"]["message"]
    cut = httpx.post(f"{running.url}/api/embed", json={"model": "minilm", "input": LONG}).json()["embeddings"]
    assert np.abs(np.array(cut) - reference.encode([LONG])).max() < tolerance
