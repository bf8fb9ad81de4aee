"""What is known of each family, a file a family: a `Family` of a few lines."""
