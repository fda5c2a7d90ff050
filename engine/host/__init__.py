"""What there is to know of the host without torch."""
