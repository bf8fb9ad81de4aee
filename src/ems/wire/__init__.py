"""The protocol between SDK, agents and peers: messages and the frames that carry them. Pure."""
