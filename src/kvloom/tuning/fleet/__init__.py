"""A fleet of replicas, simulated: traces of the field, routing, roles, failures, and how many replicas an SLO needs."""
