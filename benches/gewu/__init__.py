"""Benches of Gewu, through its C ABI."""
