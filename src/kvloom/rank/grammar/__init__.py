"""Which tokens a grammar or a reasoning budget allows next."""
