"""Simulates a fleet of replicas: real traces, routing, roles, failures, and how many replicas an SLO needs."""
