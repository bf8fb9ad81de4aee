"""Names of models by their files; GGUF models in several are NAME-00001-of-00003.gguf and so on."""

import re
from pathlib import Path

_NAME = re.compile(r"(.*-)(\d{5})-of-(\d{5})\.gguf\Z", re.DOTALL)


def named_parts(path: Path) -> list[Path]:
    """The files of a model, by the name of the first; the path itself where the name is not that of a first part."""
    found = _NAME.match(path.name)
    if not found or int(found[2]) != 1 or not int(found[3]):
        return [path]
    return [_part(path, found, number) for number in range(1, int(found[3]) + 1)]


def first_part(path: Path) -> Path | None:
    """The first file of the model of which `path` is named like a part; None where it is not."""
    found = _NAME.match(path.name)
    return _part(path, found, 1) if found else None


def is_later_part(name: str) -> bool:
    """Whether a file is named like a part that is not the first."""
    found = _NAME.match(name)
    return found is not None and int(found[2]) != 1


def model_name(path: Path) -> str:
    """The name of a model: of a folder its own, of a GGUF file what stands before `.gguf` and a part's number."""
    found = _NAME.match(path.name)
    return found[1].removesuffix("-") if found else (path.name or path.resolve().name).removesuffix(".gguf")


def _part(path: Path, found: re.Match[str], number: int) -> Path:
    return path.with_name(f"{found[1]}{number:05}-of-{found[3]}.gguf")
