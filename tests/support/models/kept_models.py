"""Small models that take seconds to make are made once and kept. Libraries that make them are imported only then."""

from collections.abc import Callable
from importlib import import_module
from importlib.metadata import version
from pathlib import Path

from tests.support.kept import kept


def tiny_gguf(demo: Path) -> Path:
    """The tiny model that tiny_gguf.py makes from the demo model's file."""

    def make(path: Path) -> None:
        import_module("tests.support.models.tiny_gguf").make_tiny_gguf(demo, path)

    return _kept("tiny_gguf.py", ("gguf",), str(demo.stat().st_size), "tiny.gguf", make)


def pipeline(kind: str) -> Path:
    """The folder of a pipeline; `kind` is a key of KINDS in pipelines.py."""

    def make(folder: Path) -> None:
        import_module("tests.support.models.pipelines").KINDS[kind](folder)

    return _kept("pipelines.py", ("diffusers", "transformers"), kind, "made", make) / "pipeline"


def _kept(source: str, libraries: tuple[str, ...], of: str, name: str, make: Callable[[Path], None]) -> Path:
    """Makes a model once per version of its libraries and of `source`, the file beside this one with its code."""
    versions = [version(library).encode() for library in libraries]
    return kept([Path(__file__).with_name(source).read_bytes(), of.encode(), *versions], name, make)
