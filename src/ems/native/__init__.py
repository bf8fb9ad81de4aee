"""The data path in C++: what is compiled, where it is found, and the fallback without it."""
