"""Forwards written down once, and run again without the interpreter: what CUDA graphs are on a GPU.

A step of few rows calls some hundred kernels that are over in microseconds; finding them takes longer
than running them. ``recorder`` writes down what one forward does, ``graph`` does it again, and
``captures`` decides which forwards are worth it and sees to it that their results have the same bits.
"""
