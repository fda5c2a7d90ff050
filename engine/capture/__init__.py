"""Forwards run again without the interpreter: recordings on a CPU, graphs on a GPU (``replays``).

A step of few rows calls some hundred kernels that are over in microseconds; finding them takes longer
than running them. On a CPU ``recorder`` writes down what a forward does, ``sample`` makes numbers of it,
``recording`` does it again for any number of rows, and ``captures`` decides when, and sees to it that
results have the same bits.
On a GPU the driver does so at start, for steps padded to buckets.
"""
