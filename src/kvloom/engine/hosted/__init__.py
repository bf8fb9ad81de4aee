"""An engine whose scheduling is done in a process of its own: whole requests go there, tokens come back."""
