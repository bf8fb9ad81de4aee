"""The known families, one file each: a `Family` of a few lines."""
