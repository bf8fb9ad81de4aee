"""Configuration of the V1 context-caching interface."""
