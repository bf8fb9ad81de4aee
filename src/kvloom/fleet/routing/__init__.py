"""Where a request goes: what is known, what is decided, and the router of Serve that does both."""
