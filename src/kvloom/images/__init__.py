"""Text-to-image: a process that holds a diffusers pipeline (main.py), and the server's side of it (process.py)."""
