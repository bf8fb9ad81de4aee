"""What the server and the pool share at their sockets: listening, TLS files, and checks of requests from browsers."""
