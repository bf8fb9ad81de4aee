"""`kvloom fleet run | check`. Options and wiring, no logic."""

import logging
import os
import platform
import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any, cast

import msgspec
import typer

from kvloom.commands import finite
from kvloom.contract.errors import BadRequest, UserError
from kvloom.fleet.args import FleetArgs, HttpOptions, read_fleet_file
from kvloom.fleet.plan import make_plan
from kvloom.server.config.settings import ServerConfig, Settings
from kvloom.server.observe.logs import start_logging
from kvloom.server.run.launch import notes_of
from kvloom.server.run.loading import Opening
from kvloom.server.run.main import serve

log = logging.getLogger(__name__)
app = typer.Typer(help="One model on many engines, with Ray Serve.", no_args_is_help=True, add_completion=False)


@app.command()
def run(
    model: Annotated[str | None, typer.Argument(help="A folder, a .gguf file, or the name of a fetched model.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, max=10_000, help="Engines, each with the whole model.")] = None,
    fleet: Annotated[Path | None, typer.Option(help="A fleet.yaml; the other options override it.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json for every replica.")] = None,
    backend: Annotated[
        str | None, typer.Option(help="As kvloom serve's: auto, cpu, torch, mock or an engine that is installed.")
    ] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = None,
    cpus: Annotated[
        float | None, typer.Option(min=0, max=10**9, callback=finite, help="CPUs of a rank, in Ray's books.")
    ] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard, on loopback.")] = False,
) -> None:
    """Start a Ray on this machine, serve MODEL on several engines, and end it all on Ctrl-C."""
    args, options = read_fleet_file(fleet) if fleet else (FleetArgs(), HttpOptions())
    given: dict[str, Any] = {"model": model, "replicas": replicas, "backend": backend, "cpus_per_rank": cpus}
    given |= {"config": str(config.resolve()) if config else None, "host": host, "port": port}
    args = msgspec.structs.replace(args, **{name: value for name, value in given.items() if value is not None})
    listening = {name: getattr(options, name) for name in ("host", "port") if getattr(args, name) is None}
    args = msgspec.structs.replace(args, **listening)
    plan = make_plan(args, is_behind_proxy=False)
    server = plan.config(platform.node())
    start_logging(server.log)
    for note in notes_of(Settings(plan.values), os.environ):
        log.warning("%s", note)
    fleets: list[Any] = []

    def opening(server: ServerConfig) -> Opening:
        fleets.append(_local().LocalFleet(plan, server, dashboard, _tell))
        return cast(Opening, fleets[0])

    serve(server, opening)
    if fleets[0].problem:
        raise UserError(fleets[0].problem)


@app.command()
def check(fleet: Annotated[Path, typer.Argument(help="A fleet.yaml.")]) -> None:
    """Say what is wrong with a fleet.yaml, or that nothing is."""
    args, _ = read_fleet_file(fleet)
    make_plan(args, f"{fleet}: applications[0].args")
    print(f"{fleet} is right")


def _local() -> Any:
    """Imports Ray, which takes a second. Raises BadRequest where Ray is not installed."""
    try:
        return import_module("kvloom.fleet.local")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvloom":
            raise
        raise BadRequest("", f"a fleet needs Ray ({error.name} is missing): pip install 'kvloom[ray]'") from None


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
