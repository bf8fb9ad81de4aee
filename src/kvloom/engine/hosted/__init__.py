"""Engines that schedule by themselves, in a process of their own: they get whole requests and return tokens."""
