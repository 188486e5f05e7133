# SPDX-License-Identifier: Apache-2.0
"""Confidence intervals by bootstrap over texts. Questions about one text are right or wrong together, so what is drawn
again, with replacement, is texts with all their questions. Standard library only; the same numbers give the same
interval."""
import math
import random
import statistics


def grouped(values, per_text):
    """[[1, 0], [1]] of [1, 0, 1] and [2, 1]: the values of each text."""
    if sum(per_text) != len(values):
        raise ValueError(f"{len(values)} values do not fill texts of {sum(per_text)} questions")
    groups, begin = [], 0
    for count in per_text:
        groups.append(values[begin:begin + count])
        begin += count
    return groups


def texts_of_points(points, values=None):
    """The values of each text over points, which may be of several seeds. Without `values(point)` a value is 1 for a
    mark '1', else 0; a point without "questions_per_text" has one value for each text."""
    texts = []
    for point in points:
        own = values(point) if values else [float(mark == "1") for mark in point["marks"]]
        texts += grouped(own, point.get("questions_per_text", [1] * len(own)))
    return texts


def bounds(found, confidence):
    """The interval that holds so many of the numbers found in draws."""
    cuts = statistics.quantiles(found, n=2000, method="inclusive")
    tail = round((1 - confidence) / 2 * 2000)
    return cuts[tail - 1], cuts[-tail]


def interval(texts, confidence=0.95, draws=2000):
    """The mean over all values and the bounds of its interval, by percentiles: (mean, low, high). With less than two
    texts the bounds are nan."""
    sums = [(math.fsum(text), len(text)) for text in texts if text]
    if not sums:
        return math.nan, math.nan, math.nan
    mean = math.fsum(total for total, _ in sums) / sum(count for _, count in sums)
    if len(sums) < 2:
        return mean, math.nan, math.nan
    drawing = random.Random(20240406)
    means = []
    for _ in range(draws):
        total = count = 0
        for _ in sums:
            own, questions = sums[int(drawing.random() * len(sums))]
            total += own
            count += questions
        means.append(total / count)
    return mean, *bounds(means, confidence)


def difference(texts, others, **settings):
    """The same for the mean difference of two plans on the same texts, which are drawn together."""
    if [len(text) for text in texts] != [len(text) for text in others]:
        raise ValueError("the two plans were not asked the same questions")
    return interval([[a - b for a, b in zip(text, other)] for text, other in zip(texts, others)], **settings)


def ratio(texts, others, confidence=0.95, draws=2000):
    """The mean of the one over the mean of the other, on the same texts (a value each), which are drawn together."""
    if len(texts) != len(others):
        raise ValueError("the two plans were not asked the same questions")
    whole = math.fsum(texts) / math.fsum(others)
    if len(texts) < 2:
        return whole, math.nan, math.nan
    drawing = random.Random(20240406)
    found = []
    for _ in range(draws):
        drawn = [int(drawing.random() * len(texts)) for _ in texts]
        found.append(math.fsum(texts[i] for i in drawn) / math.fsum(others[i] for i in drawn))
    return whole, *bounds(found, confidence)


def shown(found, unit=100, digits=1):
    """"84.0 (76.5 to 90.2)"."""
    mean, low, high = (value * unit for value in found)
    if math.isnan(low):
        return f"{mean:.{digits}f}"
    return f"{mean:.{digits}f} ({low:.{digits}f} to {high:.{digits}f})"
