"""Of Gewu, through its C ABI."""
