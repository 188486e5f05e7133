# SPDX-License-Identifier: Apache-2.0
"""What a format does to the rows of one side (keys or values) of a layer: a Coder has the bits of a number, with scales and
zeros, and `restore`, which rounds rows [heads, rows, channels] to what the format keeps. In each group of numbers that
share a scale:

  affine      ours: scale * code + zero; zero is the minimum rounded down to half, the scale is rounded up to half
  affine_near KIVI, Quanto: the same with scale and zero in the nearest half
  hqq         HQQ: the scale of the range, a zero between codes that is moved until the error's 0.7-norm is small
  q8_0, q4_0, q4_1  llama.cpp: blocks of 32 channels, scale (and minimum) in half
  levels      Lloyd-Max levels of the normal distribution times a scale (and plus a mean) in half
  turbo_quant a random rotation, Lloyd-Max levels of a coordinate of the sphere, the row's norm in half
  fp8         e4m3 with one float scale for each head
  mxfp4       e2m1 with a power of two for each 32 channels
  nvfp4       e2m1 with a scale in e4m3 for each 16 channels and a float scale for the tensor

The arithmetic follows the published descriptions (README.md names them), written anew.
"""
from dataclasses import dataclass
from typing import Callable

import numpy as np

from lloyd_max import nearest, normal_levels, sphere_levels
from rotation import hadamard, in_rotation, random_rotation
from rounding import E2M1_LARGEST, E4M3_LARGEST, e2m1, e4m3, e8m0_below, half, half_at_least, half_at_most


@dataclass(frozen=True)
class Coder:
    bits: float  # of a number, with its share of scales and zeros
    restore: Callable


def by_row(restore, group):
    """Groups of `group` channels of a row. `restore(x, axis)` gets numbers whose groups lie along the axis."""
    def restored(rows):
        if rows.shape[-1] % group:
            raise ValueError(f"rows of {rows.shape[-1]} channels have no groups of {group}")
        return restore(rows.reshape(*rows.shape[:-1], -1, group), -1).reshape(rows.shape)
    return restored


def by_channel(restore, group):
    """Groups of `group` rows of a channel. What is left over at the end is a shorter group."""
    def restored(rows):
        heads, count, channels = rows.shape
        whole = count // group * group
        parts = [restore(rows[:, :whole].reshape(heads, -1, group, channels), 2).reshape(heads, whole, channels)]
        if whole < count:
            parts.append(restore(rows[:, None, whole:], 2)[:, 0])
        return np.concatenate(parts, axis=1)
    return restored


def over(numbers, by):
    """A quotient, or 0 where one divides by 0."""
    return np.divide(numbers, by, out=np.zeros(np.broadcast(numbers, by).shape, np.float32), where=by != 0)


def grouped(inner, bits, shared_bits, group, per, rotated):
    """A Coder of groups in the rows or channels, rotated or not."""
    restore = {"row": by_row, "channel": by_channel}[per](inner, group)
    return Coder(bits + shared_bits / group, in_rotation(restore) if rotated else restore)


def affine_numbers(x, axis, bits, to_zero, to_scale):
    levels = np.float32(2 ** bits - 1)
    zero = to_zero(x.min(axis=axis, keepdims=True))
    # For KIVI, whose zero is the nearest half, the range is the numbers' own.
    low = zero if to_zero is half_at_most else x.min(axis=axis, keepdims=True)
    scale = to_scale((x.max(axis=axis, keepdims=True) - low) / levels)
    return np.clip(np.rint(over(x - zero, scale)), 0, levels) * scale + zero


def affine(bits, group, per="row", rotated=False):
    return grouped(lambda x, axis: affine_numbers(x, axis, bits, half_at_most, half_at_least), bits, 32, group, per, rotated)


def affine_near(bits, group, per="row"):
    return grouped(lambda x, axis: affine_numbers(x, axis, bits, half, half), bits, 32, group, per, False)


def hqq_numbers(x, axis, bits):
    levels = np.float32(2 ** bits - 1)
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    spread = high - low
    scale = np.where(np.abs(spread) <= 1e-4, np.float32(1), np.minimum(over(levels, spread), np.float32(2e4)))
    zero = -low * scale
    if bits == 4:
        zero = np.rint(zero)
    beta, best = 10.0, 1e4
    for _ in range(20):
        codes = np.clip(np.rint(x * scale + zero), 0, levels)
        error = x - (codes - zero) / scale
        far = np.abs(error)
        with np.errstate(divide="ignore"):
            shrunk = np.sign(error) * np.maximum(far - far ** np.float32(-0.3) / np.float32(beta), 0)
        zero = (codes - (x - shrunk) * scale).mean(axis=axis, keepdims=True)
        beta *= 1.01
        now = float(far.mean())
        if now >= best:
            break
        best = now
    codes = np.clip(np.rint(x * scale + zero), 0, levels)
    return (codes - half(zero)) * half(1 / scale)


def hqq(bits, group, per="row"):
    return grouped(lambda x, axis: hqq_numbers(x, axis, bits), bits, 32, group, per, False)


def away_from_zero(x):
    """To the nearest integer; what lies between two goes away from 0, as C's roundf does."""
    return np.trunc(x + np.copysign(np.float32(0.5), x))


def q8_0_numbers(x, axis):
    scale = np.abs(x).max(axis=axis, keepdims=True) / np.float32(127)
    return away_from_zero(x * over(np.float32(1), scale)) * half(scale)


def q4_0_numbers(x, axis):
    # The number that is farthest from 0 (of two, the first), with its sign, becomes code 0, which stands for -8.
    farthest = np.abs(x).argmax(axis=axis, keepdims=True)
    scale = np.take_along_axis(x, farthest, axis=axis) / np.float32(-8)
    codes = np.minimum(np.trunc(x * over(np.float32(1), scale) + np.float32(8.5)), 15)
    return (codes - 8) * half(scale)


def q4_1_numbers(x, axis):
    low, high = x.min(axis=axis, keepdims=True), x.max(axis=axis, keepdims=True)
    scale = (high - low) / np.float32(15)
    codes = np.minimum(np.trunc((x - low) * over(np.float32(1), scale) + np.float32(0.5)), 15)
    return codes * half(scale) + half(low)


def q8_0(rotated=False):
    return grouped(q8_0_numbers, 8, 16, 32, "row", rotated)


def q4_0(rotated=False):
    return grouped(q4_0_numbers, 4, 16, 32, "row", rotated)


def q4_1(rotated=False):
    return grouped(q4_1_numbers, 4, 32, 32, "row", rotated)


def level_numbers(x, axis, bits, centred, fitted):
    mean = half(x.mean(axis=axis, keepdims=True)) if centred else np.float32(0)
    x = x - mean
    deviation = np.sqrt((x * x).mean(axis=axis, keepdims=True))
    codes = nearest(over(x, deviation), normal_levels(bits))
    if fitted:  # the scale with the least square error for these codes
        deviation = over((x * codes).sum(axis=axis, keepdims=True), (codes * codes).sum(axis=axis, keepdims=True))
    return codes * half(deviation) + mean


def levels(bits, group, per="row", rotated=False, centred=False, fitted=True):
    return grouped(lambda x, axis: level_numbers(x, axis, bits, centred, fitted), bits, 32 if centred else 16, group, per, rotated)


def less_mean(coder, group):
    """`coder`, of rows less the mean of each `group` of rows, which is kept in half."""
    def restore(rows):
        means = np.concatenate([np.broadcast_to(half(part.mean(axis=1, keepdims=True)), part.shape)
                                for part in np.split(rows, range(group, rows.shape[1], group), axis=1)], axis=1)
        return coder.restore(rows - means) + means
    return Coder(coder.bits + 16 / group, restore)


def turbo_quant(bits, head_dim):
    """The variant with the least square error, which is the one for values; rows of `head_dim` channels."""
    def restore(rows):
        norm = np.sqrt((rows * rows).sum(axis=-1, keepdims=True))
        return nearest(over(rows, norm), sphere_levels(bits, head_dim)) * half(norm)
    return Coder(bits + 16 / head_dim, in_rotation(restore, random_rotation))


def fp8():
    """One scale for each head and text: its share of a number is next to nothing, and not counted."""
    def restore(rows):
        scale = np.abs(rows).max(axis=(1, 2), keepdims=True) / np.float32(E4M3_LARGEST)
        return e4m3(over(rows, scale)) * scale
    return Coder(8, restore)


def mxfp4(rotated=False):
    def numbers(x, axis):
        scale = e8m0_below(np.abs(x).max(axis=axis, keepdims=True)) / np.float32(4)  # 6 = 1.5 * 2^2
        return e2m1(x / scale) * scale
    return grouped(numbers, 4, 8, 32, "row", rotated)


def nvfp4(rotated=False):
    """The tensor is a layer's keys, or values, of all heads; its scale is not counted."""
    def restore(rows):
        whole = np.abs(rows).max() / np.float32(E2M1_LARGEST * E4M3_LARGEST)

        def numbers(x, axis):
            scale = e4m3(np.abs(x).max(axis=axis, keepdims=True) / np.float32(E2M1_LARGEST) / whole) * whole
            return e2m1(over(x, scale)) * scale
        return by_row(numbers, 16)(rows)
    return Coder(4.5, in_rotation(restore) if rotated else restore)


def exact():
    return Coder(16, lambda rows: rows)
