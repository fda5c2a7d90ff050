"""What fleets do that no machine here can run: a simulation of replicas, by events.

A replica is the engine's own scheduler, block pool, drafting and gamma policies; only the model is not
there. What its steps take comes from a profile that was measured on a server (``live``).
"""
