"""Folders of a user: the cache, the data."""

import errno
import os
from collections.abc import Mapping
from pathlib import Path


def cache_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """kvloom's part of the user's cache. For a user without a home raises OSError, which names what to set."""
    return _user_folder(environ, "XDG_CACHE_HOME", ".cache")


def data_folder(environ: Mapping[str, str] = os.environ) -> Path:
    """kvloom's part of the user's data. Raises OSError as cache_folder does."""
    return _user_folder(environ, "XDG_DATA_HOME", ".local/share")


def _user_folder(environ: Mapping[str, str], variable: str, below_home: str) -> Path:
    if root := environ.get(variable):
        return Path(root) / "kvloom"
    try:
        return Path.home() / below_home / "kvloom"
    except RuntimeError:
        problem = f"this user has no home folder: set HOME or {variable}"
        raise FileNotFoundError(errno.ENOENT, problem, f"~/{below_home}") from None
