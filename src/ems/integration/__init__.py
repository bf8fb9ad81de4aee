"""EMS inside other engines."""
