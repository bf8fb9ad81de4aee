"""The daemon: connections, sessions, models in memory, and the decisions about them."""
