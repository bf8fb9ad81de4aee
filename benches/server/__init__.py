"""Of the server over HTTP, as its clients see it."""
