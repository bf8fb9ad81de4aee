"""Holds mirrors of ctypes to the C and C++ that they mirror: the compiler checks assertions, and makes nothing."""

import ctypes
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

_KINDS = """
#include <cstddef>
#include <type_traits>
template <class T> constexpr int kind() {  // 0 = nothing, -1 = an address, else bytes, of floating point plus 100
    using Plain = std::remove_cv_t<T>;
    if constexpr (std::is_void_v<Plain>) return 0;
    else if constexpr (std::is_pointer_v<Plain>) return -1;
    else return int(sizeof(Plain)) + (std::is_floating_point_v<Plain> ? 100 : 0);
}
template <class R, class... A, size_t N> constexpr bool fits(R (*)(A...), const int (&kinds)[N]) {
    size_t at = 0;
    return N == 1 + sizeof...(A) && kind<R>() == kinds[at++] && ((kind<A>() == kinds[at++]) && ... && true);
}
"""


def structs(mirrors: Mapping[str, type[ctypes.Structure]], spelled: Callable[[str], str] = str) -> Iterator[str]:
    """Assertions on structs: sizes, and offset and size of each field. `mirrors`: name in C++ -> mirror; `spelled`:
    a field's name in C++.
    """
    for name, mirror in mirrors.items():
        yield f'static_assert(sizeof({name}) == {ctypes.sizeof(mirror)}, "size of {name}");'
        for field, *_ in mirror._fields_:
            found = getattr(mirror, field)
            own = spelled(field)
            assertion = f"offsetof({name}, {own}) == {found.offset} && sizeof({name}::{own}) == {found.size}"
            yield f'static_assert({assertion}, "{name}.{field}");'


def functions(signatures: Mapping[str, tuple[Any, Iterable[Any]]]) -> Iterator[str]:
    """Assertions on functions. `signatures`: name -> (result, arguments), as ctypes has them."""
    for name, (result, arguments) in signatures.items():
        kinds = ", ".join(str(_kind(each)) for each in (result, *arguments))
        yield f'static_assert(fits({name}, {{{kinds}}}), "{name}");'


def _kind(type_: Any) -> int:
    if type_ is None:
        return 0
    if type_ in (ctypes.c_float, ctypes.c_double):
        return 100 + ctypes.sizeof(type_)
    is_address = type_ in (ctypes.c_void_p, ctypes.c_char_p) or issubclass(type_, ctypes._Pointer)
    return -1 if is_address else ctypes.sizeof(type_)


def wrong(source: Path, assertions: Iterable[str], *folders: Path) -> list[str]:
    """The compiler's errors for the assertions behind `source`. `folders`: of headers."""
    text = "\n".join([f'#include "{source}"', _KINDS, *assertions])
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    assert compiler is not None
    flags = ["-std=c++17", "-fsyntax-only", "-w", *(f"-I{folder}" for folder in (source.parent, *folders))]
    done = subprocess.run(
        [compiler, *flags, "-x", "c++", "-"], input=text, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 0 or "error" in done.stderr, done.stderr
    return [line for line in done.stderr.splitlines() if "error" in line]
