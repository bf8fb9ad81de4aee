"""The daemon's side of other processes: workers, the prober, and a fake host for tests."""
