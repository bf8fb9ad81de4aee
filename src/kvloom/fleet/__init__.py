"""One model on many engines: a Ray Serve application, routing by prefixes, and answers that outlive a replica."""
