"""Decisions: predicates, choices and scores over one input, answered from the odds of the possible answers."""
