"""Forwards run again without the interpreter: recordings on a CPU, graphs on a GPU (``replays``).

A step of few rows calls some hundred kernels that are over in microseconds; finding them takes longer
than running them. On a CPU ``recording`` writes down what one forward does and does it again, and
``captures`` decides which forwards are worth it and sees to it that their results have the same bits.
On a GPU the driver does so at start, for steps padded to buckets.
"""
