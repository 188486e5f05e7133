# SPDX-License-Identifier: Apache-2.0
"""Numbers of few bits: half (to the nearest, and rounded down or up as our storage does), e4m3, e2m1 and e8m0 (OCP's
formats of 8 and 4 bits). Everything returns float32."""
import numpy as np

E4M3_LARGEST, E2M1_LARGEST = 448.0, 6.0


def half(x):
    """The nearest half."""
    return np.asarray(x, np.float32).astype(np.float16).astype(np.float32)


def half_at_most(x):
    """The largest half that is not above x. 0 is never -0."""
    x = np.asarray(x, np.float32)
    near = x.astype(np.float16)
    with np.errstate(over="ignore"):  # below the least half there is none
        near = np.where(near.astype(np.float32) > x, np.nextafter(near, np.float16(-np.inf)), near)
    return near.astype(np.float32) + np.float32(0)


def half_at_least(x):
    """The smallest half that is not below x."""
    return -half_at_most(-np.asarray(x, np.float32)) + np.float32(0)


def small_float(x, mantissa, lowest_exponent, largest):
    """The nearest number with so many bits of mantissa, the even one where two are; below 2^lowest_exponent they are
    subnormal; above `largest` it is `largest`."""
    x = np.asarray(x, np.float32)
    exponent = np.maximum(np.frexp(x)[1] - 1, lowest_exponent)
    step = np.ldexp(np.float32(1), exponent - mantissa)
    return np.clip(np.rint(x / step) * step, -largest, largest).astype(np.float32)


def e4m3(x):
    """The variant of OCP and of PyTorch's float8_e4m3fn: no infinities. What is above 448 becomes 448."""
    return small_float(x, 3, -6, E4M3_LARGEST)


def e2m1(x):
    return small_float(x, 1, 0, E2M1_LARGEST)


def e8m0_below(x):
    """The largest power of two that is not above x > 0; what is 0 gives the smallest that e8m0 has."""
    x = np.asarray(x, np.float32)
    exponent = np.where(x > 0, np.frexp(x)[1] - 1, -127)
    return np.ldexp(np.float32(1), np.clip(exponent, -127, 127))
