# SPDX-License-Identifier: Apache-2.0
"""Levels with the least mean square error for numbers of a known distribution (Lloyd 1982, Max 1960): each level is the
mean of what is nearest to it, and each border lies halfway between two levels."""
import math
from functools import lru_cache

import numpy as np


def fixed_point(levels, mean_between):
    """The levels that no round moves any more. `mean_between(low, high)` is the distribution's mean in an interval."""
    for _ in range(20000):
        borders = [-math.inf] + [(a + b) / 2 for a, b in zip(levels, levels[1:])] + [math.inf]
        moved = [mean_between(low, high) for low, high in zip(borders, borders[1:])]
        if max(abs(a - b) for a, b in zip(levels, moved)) < 1e-12:
            break
        levels = moved
    return np.array(levels)


def normal_mean_between(low, high):
    density = lambda x: math.exp(-x * x / 2) / math.sqrt(2 * math.pi)
    return (density(low) - density(high)) / ((math.erf(high / math.sqrt(2)) - math.erf(low / math.sqrt(2))) / 2)


@lru_cache
def normal_levels(bits):
    """Of the normal distribution with mean 0 and deviation 1."""
    count = 2 ** bits
    return fixed_point([3 * (2 * i + 1 - count) / count for i in range(count)], normal_mean_between)


@lru_cache
def sphere_levels(bits, n):
    """Of one coordinate of a point drawn evenly from the unit sphere in n dimensions, as TurboQuant has it."""
    x = np.linspace(-1, 1, 200001)
    density = (1 - x * x) ** ((n - 3) / 2)
    mass, moment = np.concatenate([[0], np.cumsum(density)]), np.concatenate([[0], np.cumsum(x * density)])

    def mean_between(low, high):
        a, b = np.searchsorted(x, (low, high))
        return (moment[b] - moment[a]) / (mass[b] - mass[a])

    return fixed_point(list(normal_levels(bits) / math.sqrt(n)), mean_between)


def nearest(x, levels):
    """The level nearest to each number."""
    borders = ((levels[1:] + levels[:-1]) / 2).astype(np.float32)
    return levels.astype(np.float32)[np.searchsorted(borders, x)]
