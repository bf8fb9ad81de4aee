"""`mindieservice_daemon`: the server as the documented deployment starts it (spec 2.4.1)."""

import argparse
import os
import sys
from pathlib import Path

from kvloom.contract.errors import UserError
from kvloom.mistakes import problem_of
from kvloom.server.run.launch import launch, read_settings
from kvloom.streams import open_standard_streams


def main() -> None:
    """Serves until a signal; a mistake is one line and exit code 1. Logs go to the file, not to the terminal."""
    open_standard_streams()
    parser = argparse.ArgumentParser(prog="mindieservice_daemon", description="Serve the models of a config.json.")
    parser.add_argument("--config", type=Path, metavar="FILE", help="default: conf/config.json in the install folder")
    parser.add_argument("--pid-file", type=Path, metavar="FILE", help="write the process number here while serving")
    given = parser.parse_args()
    config = given.config or Path(os.environ.get("MIES_INSTALL_PATH", ".")) / "conf" / "config.json"
    try:
        settings = read_settings(config, os.environ)
        settings.override(pid_file=given.pid_file, is_log_on_console=False)
        launch(settings)
    except (UserError, OSError) as error:
        problem = problem_of(error)
        if problem is None:
            raise
        print(f"mindieservice_daemon: {problem}", file=sys.stderr)
        sys.exit(1)


if __name__ == "__main__":
    main()
