"""Values by keys of the caller's own, beside the document's blocks of a registered cache: what other engines store."""
