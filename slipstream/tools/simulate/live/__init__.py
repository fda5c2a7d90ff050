"""Real replicas: measured for a profile, and put beside a simulation of them."""
