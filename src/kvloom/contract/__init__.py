"""What engine and rank both speak: requests, sampling, configuration, errors, and the messages between them."""
