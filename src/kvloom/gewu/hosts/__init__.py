"""The daemon's ends of other processes: workers, the prober, and a fake host for tests."""
