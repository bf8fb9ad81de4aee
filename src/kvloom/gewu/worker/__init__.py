"""The worker process, which holds one model and runs an engine for the daemon."""
