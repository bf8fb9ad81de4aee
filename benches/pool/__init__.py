"""Of the KV pool: one node, many, and beside other stores."""
