"""Values by keys of the caller's own, besides the blocks of a registered cache: used by plug-ins for other engines."""
