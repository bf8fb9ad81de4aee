"""Shared libraries that C and C++ programs link with: built once, laid down where a developer looks for them."""
