"""Builds libqos.so, and gives the flags that programs are built with. Needs only `cc`."""

from pathlib import Path

from kvloom.native.build import C, NativeLibrary

PACKAGE = Path(__file__).parent
LIBRARY = NativeLibrary("gewu", PACKAGE, "libqos.so.1", "c/*.c", "c/libqos.map", C)
INCLUDE, SONAME = LIBRARY.include, LIBRARY.soname
library, compile_library = LIBRARY.path, LIBRARY.compile
