"""Loops over rows, compiled by numba for the machine they run on.

``lanes`` is what they are written in, ``compiled`` how they are compiled and run by torch's own threads;
every other file is one kernel.
"""
