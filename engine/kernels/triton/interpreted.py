"""Replacements of operations that Triton's interpreter does otherwise than a device."""

import triton
import triton.language as tl


@triton.jit
def product_in_order(
    left,  # [rows, inputs]
    right,  # [inputs, features]
):
    """As ``tl.dot``, of any float type, in float32: ``[rows, features]``, a row's inputs added up one
    after another. The interpreter's own product is numpy's, which knows no bfloat16 and leaves the order
    to a BLAS: OpenBLAS's kernels for some kinds of CPU (Haswell, Zen) add up the last rows of a tile in
    another order than the others."""
    products = left.to(tl.float32)[:, :, None] * right.to(tl.float32)[None, :, :]
    return tl.sum(products, 1)
