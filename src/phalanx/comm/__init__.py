"""Groups of ranks, and what they can do together."""
