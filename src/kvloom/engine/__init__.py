"""The engine's process: sequences and blocks, one step at a time, on a thread of its own."""
