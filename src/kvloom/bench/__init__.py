"""`kvloom bench`: measures a server as clients see it, and the kernels below it against the memory bandwidth."""
