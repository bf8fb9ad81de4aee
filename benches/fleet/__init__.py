"""Of replicas behind one address."""
