"""Images in requests: where they come from, and what a model makes of them before it answers."""
