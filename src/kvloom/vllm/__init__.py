"""vLLM as an engine behind the server: its process (`main`), and the server's side of it (`opening`)."""
