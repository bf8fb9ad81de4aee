"""`kvloom bench`: a server measured as its clients see it, and the kernels below it, against the memory's rate."""
