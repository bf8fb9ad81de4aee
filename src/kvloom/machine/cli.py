"""`kvloom doctor`, `kvloom models`, `kvloom cache`."""

import json
import os
import time
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from typing import Annotated

import typer

from kvloom.contract.errors import BadRequest
from kvloom.machine.facts import read_facts
from kvloom.machine.findings import choose, findings, lines
from kvloom.rank.kernels.kept import FOLDER_VARIABLE, OFF, KeptWeights, kept_weights

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Folder = Annotated[
    Path | None, typer.Option(help=f"Of the kept weights; default: ${FOLDER_VARIABLE}, or below ~/.cache.")
]

cache = typer.Typer(help="Packed weights that are kept between starts.", add_completion=False)


def doctor(as_json: Json = False) -> None:
    """Say what this machine has, which back end serves on it and why, what slows it and what is missing.

    The first thing to put into a bug report. Exit status 1 when something is missing.
    """
    facts = read_facts()
    found = findings(facts)
    if as_json:
        told = {**asdict(facts), "cpu_flags": sorted(facts.cpu_flags)}
        print(json.dumps({"facts": told, "backend": asdict(choose(facts)), "findings": [asdict(f) for f in found]}))
    else:
        print("\n".join(lines(found)))
    raise typer.Exit(any(each.mark == "MISS" for each in found))


def models(as_json: Json = False) -> None:
    """Models that are here by name: family, format, size, licence, and what they take of memory."""
    models = import_module("kvloom.machine.models")  # imports what is needed to open models
    found = models.rows()
    print(json.dumps([asdict(row) for row in found]) if as_json else "\n".join(models.lines(found)))


@cache.callback(invoke_without_command=True)
def show(context: typer.Context, folder: Folder = None, as_json: Json = False) -> None:
    """Packed weights that are kept between starts: which, how large, when last used."""
    if context.invoked_subcommand is not None:
        return
    kept = _kept(folder)
    try:
        entries = kept.entries()
    except OSError as error:
        raise BadRequest(str(kept.folder), error.strerror or str(error)) from None
    if as_json:
        rows = [
            {"file": str(e.path), "bytes": e.num_bytes, "used_s": e.used_s, "model": e.model, "is_whole": bool(e.key)}
            for e in entries
        ]
        print(json.dumps({"folder": str(kept.folder), "max_bytes": kept.max_bytes, "entries": rows}))
        return
    now_s = time.time()
    for entry in entries:
        what = f"{entry.key.format:5} {entry.key.isa:8} {entry.model}" if entry.key else f"damaged: {entry.path.name}"
        print(f"{entry.num_bytes >> 20:6} MiB  {_ago(now_s - entry.used_s):>8}  {what}")
    held = sum(entry.num_bytes for entry in entries)
    print(f"{held >> 20:6} MiB of at most {kept.max_bytes >> 20} in {kept.folder}")


@cache.command()
def clear(folder: Folder = None) -> None:
    """Remove all of them. Servers that run go on; the next start packs again."""
    kept = _kept(folder)
    try:
        num_bytes = kept.clear()
    except OSError as error:
        raise BadRequest(str(kept.folder), error.strerror or str(error)) from None
    print(f"{num_bytes >> 20} MiB removed from {kept.folder}")


@cache.command()
def verify(folder: Folder = None) -> None:
    """Read every kept file and compare it with its checksum; those that differ are removed. Exit status 1 then."""
    kept = _kept(folder)
    try:
        bad = [entry for entry in kept.entries() if not kept.is_sound(entry)]
        for entry in bad:
            entry.path.unlink(missing_ok=True)
            print(f"{entry.path.name}: is damaged; it was removed")
    except OSError as error:
        raise BadRequest(str(kept.folder), error.strerror or str(error)) from None
    raise typer.Exit(bool(bad))


def _kept(folder: Path | None) -> KeptWeights:
    """The cache of packed weights. Raises BadRequest when it is off."""
    kept = kept_weights(os.environ, "" if folder is None else str(folder))
    if kept is None:
        raise BadRequest(FOLDER_VARIABLE, f'is "{OFF}": no weights are kept; name a folder with --folder')
    return kept


def _ago(age_s: float) -> str:
    """The age in words."""
    for unit, size in (("d", 86400), ("h", 3600), ("min", 60)):
        if age_s >= size:
            return f"{age_s / size:.0f} {unit}"
    return "now"
