"""`llm_engine_test [DATASET] [RECORD]`: runs a data set through the engine of conf/config.json (spec 3.4.3)."""

import argparse
import os
import sys
from pathlib import Path

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

from kvloom.contract.errors import ServingError
from kvloom.server.run.launch import read_engine_config
from kvloom.server.secure.api_keys import AccessError
from kvloom.tuning.dataset import FIRST_TOKEN, read_rows, write_rows
from kvloom.tuning.drive import drive
from kvloom.tuning.figures import Figures, table

DEFAULT_DATASET = "token_input_gsm.csv"
OUTPUT = Path("token_output.csv")


def main() -> None:
    """Exit code 1 and one line for an error, 2 when some requests failed, 130 after Ctrl-C."""
    parser = argparse.ArgumentParser(prog="llm_engine_test", description="Measure the engine with a data set.")
    parser.add_argument("dataset", nargs="?", default=DEFAULT_DATASET, help="CSV, a row of token ids a prompt")
    parser.add_argument("record", nargs="?", type=int, default=0, help=f"above 0: write the answers to {OUTPUT}")
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: conf/config.json in the install folder")
    given = parser.parse_args()
    config = given.config or Path(os.environ.get("MIES_INSTALL_PATH", ".")) / "conf" / "config.json"
    try:
        num_failed = run(Path(given.dataset), given.record > 0, config)
    except (ServingError, AccessError, OSError) as error:
        print(f"llm_engine_test: {error}", file=sys.stderr)
        sys.exit(1)
    except KeyboardInterrupt:
        sys.exit(130)
    sys.exit(2 if num_failed else 0)


def run(dataset: Path, is_recording: bool, config: Path) -> int:
    """Print the figures. Returns how many requests failed."""
    console, errors = Console(), Console(stderr=True)
    prompts = read_rows(dataset)
    engine = read_engine_config(config, logs=True)
    others = sum(row[0] != FIRST_TOKEN for row in prompts)
    if others:
        errors.print(
            f"{others} of {len(prompts)} rows do not begin with token {FIRST_TOKEN}; they are sent as they are"
        )
    columns = (BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[tokens]} tokens"), TimeRemainingColumn())
    with Progress(TextColumn("requests"), *columns, console=errors) as bar:
        task = bar.add_task("requests", total=len(prompts), tokens=0)
        found = drive(engine, prompts, progress=lambda done, tokens: bar.update(task, completed=done, tokens=tokens))
    print_figures(found.figures, console)
    for error in sorted({times.error for times in found.times if times.error}):
        errors.print(f"failed: {error}")
    if is_recording:
        write_rows(OUTPUT, found.answers)
        console.print(f"answers are in {OUTPUT}")
    return found.figures.num_failed


def print_figures(found: Figures, console: Console) -> None:
    shown = Table(show_header=False)
    for name, value in table(found):
        shown.add_row(name, value)
    console.print(shown)
