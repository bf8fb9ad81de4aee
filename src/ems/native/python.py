"""Addresses of this interpreter's functions for C++, which reads the caller's lists and arrays with them."""

import ctypes
import sys
import sysconfig

import numpy as np

_found: list["Python | None"] = []
_FUNCTIONS = (
    "PyList_Size",
    "PyList_GetItem",
    "PyTuple_Size",
    "PyTuple_GetItem",
    "PyObject_Type",
    "Py_DecRef",
    "PyLong_AsLongLong",
    "PyLong_AsUnsignedLongLong",
    "PyErr_Occurred",
    "PyErr_Clear",
    "PyObject_GetBuffer",
    "PyBuffer_Release",
    "PyEval_SaveThread",
    "PyEval_RestoreThread",
)
_TYPES = (list, tuple, int, np.ndarray)


class Python(ctypes.Structure):
    """Addresses of functions of Python's stable ABI, and of types (given.hpp)."""

    _fields_ = [(name, ctypes.c_void_p) for name in (*_FUNCTIONS, *(kind.__name__ for kind in _TYPES))]


def python_functions() -> Python | None:
    """Those of this interpreter; None where it does not export them."""
    if not _found:
        _found.append(_look_for_functions())
    return _found[0]


def _look_for_functions() -> Python | None:
    if sys.implementation.name != "cpython" or sysconfig.get_config_var("Py_GIL_DISABLED"):
        return None  # lists are read under the interpreter's lock
    try:
        addresses = [ctypes.cast(getattr(ctypes.pythonapi, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except AttributeError:
        return None
    return Python(*addresses, *map(id, _TYPES))
