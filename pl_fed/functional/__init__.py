"""Mathematics on tensors, without Lightning and without state."""
