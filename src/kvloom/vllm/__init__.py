"""vLLM as an engine of the server: its process (`main`), and the server's side of it (`opening`)."""
