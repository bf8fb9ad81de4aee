"""`kvloom fleet run | check`. Options and wiring, no logic."""

import sys
from importlib import import_module
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from kvloom.contract.errors import BadRequest, UserError
from kvloom.fleet.args import FleetArgs, read_fleet_file
from kvloom.fleet.plan import make_plan
from kvloom.server.secure.api_keys import check_bind

app = typer.Typer(help="One model on many engines, with Ray Serve.", no_args_is_help=True, add_completion=False)
_DEFAULT_PORT = 1025


@app.command()
def run(
    model: Annotated[str | None, typer.Argument(help="A folder, a .gguf file, or the name of a fetched model.")] = None,
    replicas: Annotated[int | None, typer.Option(min=1, help="Engines, each with the whole model.")] = None,
    fleet: Annotated[Path | None, typer.Option(help="A fleet.yaml; the other options override it.")] = None,
    config: Annotated[Path | None, typer.Option(help="A config.json for every replica.")] = None,
    backend: Annotated[str | None, typer.Option(help="As kvloom serve's.")] = None,
    host: Annotated[str | None, typer.Option(help="Address to listen on.")] = None,
    port: Annotated[int | None, typer.Option(min=0, max=65535, help="Port; 0 takes a free one.")] = None,
    cpus: Annotated[float | None, typer.Option(min=0, help="CPUs of a rank, in Ray's books.")] = None,
    dashboard: Annotated[bool, typer.Option(help="Start Ray's dashboard, on loopback.")] = False,
) -> None:
    """Start a Ray on this machine, serve MODEL on several engines, and end it all on Ctrl-C."""
    args, options = read_fleet_file(fleet) if fleet else (FleetArgs(), {})
    given: dict[str, Any] = {"model": model, "replicas": replicas, "backend": backend, "cpus_per_rank": cpus}
    given |= {"config": str(config.resolve()) if config else None, "host": host or options.get("host"), "port": port}
    args = msgspec.structs.replace(args, **{name: value for name, value in given.items() if value is not None})
    if args.host is not None:
        check_bind(args.host, False, "host")
    plan = make_plan(args)
    local = _local()
    wanted = args.port if args.port is not None else options.get("port", _DEFAULT_PORT)
    with local.started(plan, wanted, dashboard, _tell) as running:
        print(f"{running.url} serves {_replicas(args)}; Ray is at {running.ray_address}", flush=True)
        problem = local.wait_for_end(args.grace_s)
    if problem:
        raise UserError(problem)


@app.command()
def check(fleet: Annotated[Path, typer.Argument(help="A fleet.yaml.")]) -> None:
    """Say what is wrong with a fleet.yaml, or that nothing is."""
    args, _ = read_fleet_file(fleet)
    make_plan(args, f"{fleet}: applications[0].args")
    print(f"{fleet} is right")


def _replicas(args: FleetArgs) -> str:
    """How many, in words."""
    least, most = args.least_replicas, args.most_replicas
    is_fixed = isinstance(args.answering, int) and (args.roles is None or isinstance(args.roles.prefill, int))
    number = f"{most}" if is_fixed else f"{least} to {most}"
    return f"{number} replica{'' if number == '1' else 's'}"


def _local() -> Any:
    """Raises BadRequest where Ray is not installed."""
    try:
        return import_module("kvloom.fleet.local")
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] == "kvloom":
            raise
        raise BadRequest("", f"a fleet needs Ray ({error.name} is missing): pip install 'kvloom[ray]'") from None


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)
