"""Decisions about sequences and KV blocks, all pure: what a step computes, who is preempted, what is cached."""
