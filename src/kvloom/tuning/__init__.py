"""Measuring an engine and choosing its parameters: data sets, `llm_engine_test`, `kvloom simulate`, `kvloom tune`."""
