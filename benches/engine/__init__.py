"""Of the engine and its ranks, without HTTP."""
