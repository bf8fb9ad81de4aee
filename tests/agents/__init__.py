"""Agents from npm and PyPI against the server, see docs/agents.md. `make agents` runs them; the test suite does not."""
