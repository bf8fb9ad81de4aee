"""Builds libkvloom_engine.so, and gives the flags that programs are built with. Needs only `c++`."""

from pathlib import Path

from kvloom.native.build import CPP, NativeLibrary

PACKAGE = Path(__file__).parent
SOURCES, EXPORTS = "cpp/*.cpp", "cpp/libkvloom_engine.map"
LIBRARY = NativeLibrary("engine_api", PACKAGE, "libkvloom_engine.so.1", SOURCES, EXPORTS, CPP)
