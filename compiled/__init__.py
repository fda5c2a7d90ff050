"""Loops that numba compiles once for a machine, for drafters and the engine alike: what they are told and
where their machine code is kept. Needs no torch."""
