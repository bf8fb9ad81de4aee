"""Shared libraries that C and C++ programs link with: built once, and installed where developers expect them."""
