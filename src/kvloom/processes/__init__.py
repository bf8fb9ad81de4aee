"""How this system's processes start and end: what a parent gives to a child, and what a child does first."""
