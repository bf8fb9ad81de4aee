"""What the server and the pool share at their sockets: listening, and who may ask through a browser."""
