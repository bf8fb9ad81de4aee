"""What the SDK and the pool service share besides the wire: the exception and its codes."""
