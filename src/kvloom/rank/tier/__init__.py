"""The outer tier of the KV cache as a rank sees it, and EMS behind it."""
