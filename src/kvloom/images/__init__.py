"""Text-to-image: a process that holds a diffusers pipeline (main.py), and the server's end of it (process.py)."""
