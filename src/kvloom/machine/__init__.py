"""What this machine has for kvloom, and what kvloom keeps on it: `kvloom doctor`, `kvloom cache`."""
