"""The way from the engine to its ranks: channel, executors, the rank processes."""
