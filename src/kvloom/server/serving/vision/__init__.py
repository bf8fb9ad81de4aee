"""Images in requests: where they come from, and how the engine turns them into prompt tokens."""
