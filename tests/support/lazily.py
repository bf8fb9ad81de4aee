"""Large libraries that few tests use: every process that collects the tests would load them, and most need none."""

import importlib.util
import sys
from typing import Any


def lazily(name: str) -> Any:
    """The module, which is loaded when something is first taken from it."""
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.find_spec(name)
    assert spec is not None, f"{name} is not installed"
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
