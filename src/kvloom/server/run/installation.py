"""Files with which the documents' scripts begin, beside the conf/ of a config.json: bin/, scripts/, set_env.sh."""

import shlex
import sys
from pathlib import Path

_COMMANDS = ("mindieservice_daemon", "llm_engine_test", "seceasy_encrypt")
_SCRIPT = "config_mindie_server_tls_cert.py"


def lay(home: Path) -> None:
    """Lay them in `home`; what is there already stays. Raises OSError."""
    installed = Path(sys.executable).parent
    for command in _COMMANDS:
        link = home / "bin" / command
        if (installed / command).exists() and not link.exists() and not link.is_symlink():
            link.parent.mkdir(mode=0o750, exist_ok=True)
            link.symlink_to(installed / command)
    if (installed / _SCRIPT).exists():
        target = repr(str(installed / _SCRIPT))  # its interpreter knows kvloom; that of `python3 scripts/...` may not
        _write(home / "scripts" / _SCRIPT, f"import os\nimport sys\n\nos.execv({target}, [{target}, *sys.argv[1:]])\n")
    path, root = (shlex.quote(str(each)) for each in (installed, home))
    _write(home / "set_env.sh", f"export PATH={path}:$PATH\nexport MIES_INSTALL_PATH={root}\n")


def _write(path: Path, text: str) -> None:
    if path.exists() or path.is_symlink():
        return
    path.parent.mkdir(mode=0o750, exist_ok=True)
    path.write_text(text)
