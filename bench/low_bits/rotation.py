# SPDX-License-Identifier: Apache-2.0
"""Rotations of head_dim channels. A rotated cache stores H k and H v; queries and outputs are rotated too, so in exact
arithmetic nothing changes but what is rounded. Here rows are rotated, rounded, and rotated back, which is the same."""
from functools import lru_cache

import numpy as np


@lru_cache
def hadamard(n):
    """Sylvester's, over sqrt(n): orthonormal and symmetric, so its own inverse."""
    if n & (n - 1):
        raise ValueError(f"a Hadamard matrix of this kind has a power of two of rows, not {n}")
    matrix = np.ones((1, 1))
    while len(matrix) < n:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix / np.sqrt(n)).astype(np.float32)


@lru_cache
def random_rotation(n, seed=0):
    """Drawn evenly from all rotations: Q of a Gaussian matrix's QR, with the signs of R's diagonal."""
    q, r = np.linalg.qr(np.random.default_rng(seed).standard_normal((n, n)))
    return (q * np.sign(np.diag(r))).astype(np.float32)


def in_rotation(restore, matrix_of=hadamard):
    """`restore`, of rotated rows."""
    def restored(rows):
        matrix = matrix_of(rows.shape[-1])
        return restore(rows @ matrix) @ matrix.T
    return restored
