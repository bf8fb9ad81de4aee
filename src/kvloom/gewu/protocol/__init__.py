"""What Gewu's processes say to each other: frames, JSON of the API, messages to workers."""
