"""The index of a tenant's blocks in C++."""
