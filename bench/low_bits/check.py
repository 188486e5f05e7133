#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks the arithmetic of the formats: bounds, numbers worked out by hand, complete tables, bits counted byte by byte, the
library's own storage (where there is a C++ compiler) and, where the Python packages gguf and ml_dtypes are installed, theirs,
bit for bit. Prints what it skipped.

  python3 bench/low_bits/check.py
"""
import itertools
import math
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

try:
    import numpy as np
except ImportError:
    print("skipped: numpy is not installed (pip install numpy)")
    sys.exit(77)

import coders
import formats
from lloyd_max import nearest, normal_levels, normal_mean_between, sphere_levels
from rotation import hadamard, random_rotation
from rounding import e2m1, e4m3, e8m0_below, half_at_least, half_at_most

HERE = Path(__file__).resolve().parent
RANDOM = np.random.default_rng(20240406)


def rows(heads=3, count=140, channels=64, outliers=True):
    """Rows like keys: two channels of each head are far larger than the others."""
    x = RANDOM.standard_normal((heads, count, channels)).astype(np.float32)
    if outliers:
        x[:, :, 5] *= 12
        x[:, :, 40] += 20
    return x


def same(found, expected, what):
    if not np.array_equal(found, expected):
        raise AssertionError(f"{what}: {found} is not {expected}")


def close(found, expected, within, what):
    if not np.all(np.abs(np.asarray(found) - np.asarray(expected)) <= within):
        raise AssertionError(f"{what}: {found} is not {expected} within {within}")


def halves():
    """Rounding down and up, on all halves and between them."""
    every = np.arange(0x7c00, dtype=np.uint16).view(np.float16).astype(np.float32)
    every = np.concatenate([-every[:0:-1], every])
    same(half_at_most(every), every, "a half rounded down")
    same(half_at_least(every), every, "a half rounded up")
    between = (every[1:] + every[:-1]) / 2
    same(half_at_most(between), every[:-1], "halfway rounded down")
    same(half_at_least(between), every[1:], "halfway rounded up")
    if np.signbit(half_at_most(np.float32(-0.0))):
        raise AssertionError("-0 is kept")


def tables():
    """e2m1 and e4m3: every number stands for itself, halfway goes to the even one, and too much to the largest."""
    two = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6], np.float32)
    eight = np.array([(m / 8 if e == 0 else 1 + m / 8) * 2.0 ** (max(e, 1) - 7) for e in range(16) for m in range(8)][:-1], np.float32)
    if len(eight) != 127 or eight[-1] != 448 or eight[1] != 2.0 ** -9:
        raise AssertionError("e4m3 has 127 numbers from 0, 2^-9 to 448")
    for round_to, table in ((e2m1, two), (e4m3, eight)):
        both = np.concatenate([-table[:0:-1], table])
        same(round_to(both), both, "a number of the table")
        for i, (low, high) in enumerate(zip(table, table[1:])):
            same(round_to((low + high) / 2), low if i % 2 == 0 else high, "halfway")
            same(round_to(np.nextafter((low + high) / 2, np.float32(0))), low, "below halfway")
            same(round_to(np.nextafter((low + high) / 2, np.float32(1e9))), high, "above halfway")
        same(round_to(np.float32(1e6)), table[-1], "too much")
    same(e8m0_below(np.float32([1, 1.5, 2, 0.75, 6, 2.0 ** -126])), np.float32([1, 1, 2, 0.5, 4, 2.0 ** -126]), "a power of two below")


def affine_bounds():
    """Nothing is off by more than scale / 2, but for float32's own rounding, at every width and grouping."""
    x = rows()
    for bits, (group, per) in itertools.product((2, 3, 4, 5, 6, 8), ((64, "row"), (32, "row"), (64, "channel"), (128, "channel"), (32, "channel"))):
        found = coders.affine(bits, group, per).restore(x)
        axis = -1 if per == "row" else 1
        starts = range(0, x.shape[axis], group)
        for start in starts:
            part = np.take(x, range(start, min(start + group, x.shape[axis])), axis=axis)
            error = np.abs(part - np.take(found, range(start, min(start + group, x.shape[axis])), axis=axis))
            zero = half_at_most(part.min(axis=axis, keepdims=True))
            scale = half_at_least((part.max(axis=axis, keepdims=True) - zero) / np.float32(2 ** bits - 1))
            if not np.all(error <= scale / 2 + 4e-6 * np.abs(part).max()):
                raise AssertionError(f"{bits} bits, groups of {group} per {per}: an error above scale / 2")
    for bits in (2, 4, 8):
        same(coders.affine(bits, 64).restore(np.full((1, 3, 64), 0.75, np.float32)), np.full((1, 3, 64), 0.75, np.float32), "equal numbers")


def by_hand():
    """Groups small enough for pencil and paper."""
    # Minimum -1, range 3, 2 bits: scale 1, zero -1; 0.5 lies between codes 1 and 2 and takes the even one.
    x = np.float32([[[-1, 0.4, 0.5, 2]]])
    same(coders.affine(2, 4).restore(x), np.float32([[[-1, 0, 1, 2]]]), "affine, 2 bits")
    # 0.1 is no half: rounded down it is 0.0999755859375, and the scale of 0.1 .. 0.7 is (0.7 - that) / 3, rounded up.
    x = np.float32([[[0.1, 0.3, 0.5, 0.7]]])
    zero, scale = 0.0999755859375, 0.2000732421875
    close(coders.affine(2, 4).restore(x), [[[zero, zero + scale, zero + 2 * scale, zero + 3 * scale]]], 1e-7, "affine of 0.1 .. 0.7")
    # q4_0: -8 is farthest, so d = 1, and 2.5 + 8.5 = 11 is code 11, which is 3; 7.6 + 8.5 = 16.1 is limited to 15: 7.
    x = np.zeros((1, 1, 32), np.float32)
    x[0, 0, :4] = -8, 2.5, 7.6, -0.4
    same(coders.q4_0().restore(x)[0, 0, :5], np.float32([-8, 3, 7, 0, 0]), "q4_0")
    # With 8 farthest, d = -1: the sign of the rounding turns round.
    same(coders.q4_0().restore(-x)[0, 0, :5], np.float32([8, -3, -7, 0, 0]), "q4_0 of the opposite")
    # q8_0: 127 is farthest, d = 1; 2.5 goes away from 0.
    x[0, 0, :4] = 127, 2.5, -2.5, 3.4
    same(coders.q8_0().restore(x)[0, 0, :5], np.float32([127, 3, -3, 3, 0]), "q8_0")
    x[0, 0] = np.linspace(0, 15, 32)
    x[0, 0, :3] = 0, 0.5, 15
    same(coders.q4_1().restore(x)[0, 0, :3], np.float32([0, 1, 15]), "q4_1")
    # MXFP4: 5 is farthest, 2^2 below it, so the scale is 1. 5 is halfway of 4 and 6: the even one (4) has mantissa 0.
    x[0, 0] = 0
    x[0, 0, :5] = 5, 2.4, -1.25, 0.2, 3.5
    same(coders.mxfp4().restore(x)[0, 0, :5], np.float32([4, 2, -1, 0, 4]), "MXFP4")
    # NVFP4: the tensor's largest is 6 * 448, so its scale is 1, and that block's is 448; the other block's is 2.
    x[0, 0] = 0
    x[0, 0, 0], x[0, 0, 16], x[0, 0, 17] = 2688, 12, 5.5
    same(coders.nvfp4().restore(x)[0, 0, [0, 16, 17]], np.float32([2688, 12, 6]), "NVFP4")
    # fp8: the head's largest becomes 448.
    same(coders.fp8().restore(np.float32([[[448, 17, 0.3]]])), np.float32([[[448, 16, 0.3125]]]), "fp8")


def rotations():
    for n in (2, 64, 128):
        close(hadamard(n) @ hadamard(n), np.eye(n), 1e-6, "Hadamard twice")
    same(np.round(hadamard(2) * math.sqrt(2)), [[1, 1], [1, -1]], "Hadamard of 2")
    close(random_rotation(64) @ random_rotation(64).T, np.eye(64), 1e-5, "a random rotation and back")
    x = rows()
    close(coders.in_rotation(lambda y: y)(x), x, 2e-5, "rotated and back")


def level_tables():
    """Max's published tables of 1960, and the fixed point: a level is the mean of what is nearest to it."""
    close(normal_levels(2)[2:], [0.4528, 1.510], 5e-4, "two bits")
    close(normal_levels(3)[4:], [0.2451, 0.7560, 1.344, 2.152], 5e-4, "three bits")
    close(normal_levels(4)[8:], [0.1284, 0.3881, 0.6568, 0.9424, 1.256, 1.618, 2.069, 2.733], 5e-4, "four bits")
    for bits in (1, 2, 3, 4):
        own = normal_levels(bits)
        close(own, -own[::-1], 1e-9, "symmetry")
        borders = [-math.inf, *((own[1:] + own[:-1]) / 2), math.inf]
        close(own, [normal_mean_between(*pair) for pair in zip(borders, borders[1:])], 1e-6, "the fixed point")
        # A coordinate of the sphere is nearly normal, and ends earlier.
        close(sphere_levels(bits, 64) * 8, own, 0.15, "levels on the sphere")
    x = RANDOM.standard_normal((1, 4000, 64)).astype(np.float32)
    for bits, error in ((2, 0.1175), (3, 0.03454), (4, 0.009497)):  # Max's table again
        close(((nearest(x, normal_levels(bits)) - x) ** 2).mean(), error, 0.02 * error, "the mean square error of normal numbers")


def bits_counted():
    """Bits from the bytes of a block of 64 rows of 64 channels, scales and zeros included."""
    numbers = 64 * 64
    for coder, stored in ((coders.affine(4, 64), 64 * (32 + 2 + 2)), (coders.affine(4, 32), 64 * (32 + 4 + 4)), (coders.affine(8, 64), 64 * 68),
                          (coders.affine(3, 64, "channel"), 64 * 24 + 64 * 4), (coders.affine(2, 32, "channel"), 64 * 16 + 2 * 64 * 4),
                          (coders.q8_0(), 64 * 2 * 34), (coders.q4_0(), 64 * 2 * 18), (coders.q4_1(), 64 * 2 * 20),
                          (coders.turbo_quant(4, 64), 64 * (32 + 2)), (coders.mxfp4(), 64 * 2 * 17), (coders.nvfp4(), 64 * 4 * 9),
                          (coders.levels(2, 64), 64 * (16 + 2)), (coders.levels(2, 64, centred=True), 64 * (16 + 4)),
                          (coders.hqq(2, 64), 64 * (16 + 4)), (coders.fp8(), 64 * 64)):
        same(coder.bits * numbers / 8, stored, "bytes of 64 rows")
    for name, own in formats.SETS.items():
        for format in own():
            if not format.bits == (format.keys.bits + format.values.bits) / 2:
                raise AssertionError(f"{name}: bits of {format.name}")


def exact_rows():
    """The rows that a format leaves alone."""
    keys, values = rows(), rows()
    for format in formats.FIRST + formats.PUBLISHED:
        new_keys, new_values = format.restored(keys, values)
        key_end = 140 // format.key_block * format.key_block if format.key_block else 140 - format.residual
        same(new_keys[:, :format.sinks], keys[:, :format.sinks], "first keys")
        same(new_keys[:, key_end:], keys[:, key_end:], "latest keys")
        same(new_values[:, 140 - format.residual:], values[:, 140 - format.residual:], "latest values")
        if np.any(np.all(new_keys[:, format.sinks:key_end] == keys[:, format.sinks:key_end], axis=-1)):
            raise AssertionError(f"{format.name}: a key that should be rounded is not")


def head_widths():
    """Each head gets its own width, and the bits are the mean over heads; a greedy choice spends what it may and no more."""
    import widths
    chosen = {"keys": [[2, 5, 3], [4, 1, 2]], "values": [[1, 2, 4], [3, 3, 5]]}
    format = widths.HeadWidths("some", chosen)
    keys, values = rows(), rows()
    for layer in range(2):
        new_keys, new_values = format(layer).restored(keys, values)
        for head in range(3):
            for side, x, found in (("keys", keys, new_keys), ("values", values, new_values)):
                bits = chosen[side][layer][head]
                same(found[head:head + 1, 4:-32], widths.CODERS[side](bits).restore(x[head:head + 1, 4:-32]), f"{side} of {bits} bits")
            # Keys of equal steps: no group of 64 rows of a rotated channel has more than 2^bits numbers.
            bits = chosen["keys"][layer][head]
            if bits > 1:
                turned = np.round((new_keys[head, 4:68] @ hadamard(64)).astype(np.float64), 3)
                if max(len(np.unique(turned[:, channel])) for channel in range(64)) > 2 ** bits:
                    raise AssertionError(f"a channel of {bits} bits has more than {2 ** bits} numbers")
    per_error = {"one text": {side: np.arange(1.0, 7).reshape(2, 3).tolist() for side in chosen}}
    errors = {side: np.broadcast_to(4.0 ** -np.arange(5), (2, 3, 5)).tolist() for side in chosen}
    for bits in (2.5, 3.0, 3.5, 4.5):
        found = widths.HeadWidths("chosen", widths.choose(per_error, errors, bits))
        if not bits - 1 / 6 <= found.bits <= bits + 1e-9:
            raise AssertionError(f"{found.bits} bits were spent of {bits}")


def worse_with_fewer_bits():
    """An error that grows as bits go is a cheap look at every coder."""
    x = rows()
    for make in (lambda b: coders.affine(b, 64), lambda b: coders.affine(b, 64, rotated=True), lambda b: coders.affine(b, 64, "channel"),
                 lambda b: coders.hqq(b, 64), lambda b: coders.levels(b, 64, rotated=True), lambda b: coders.turbo_quant(b, 64),
                 lambda b: coders.levels(b, 64, "channel", centred=True)):
        errors = [float(((make(bits).restore(x) - x) ** 2).mean()) for bits in (4, 3, 2)]
        if not errors[0] < errors[1] < errors[2]:
            raise AssertionError(f"errors {errors} with 4, 3, 2 bits")


def butterflies(x):
    """The Hadamard rotation of 64 channels in the order in which the library adds, so that floats round alike."""
    for step in (1, 2, 4, 8, 16, 32):
        pairs = x.reshape(-1, 32 // step, 2, step)
        x = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
    return x.reshape(-1, 64) * np.float32(0.125)


def as_library():
    """Rows that the library's own storage keeps, compiled: every width, channels of a row or rows of a channel, rotated or not."""
    compiler = shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")
    if not compiler:
        return "skipped, there is no C++ compiler"
    # 576 rows: whole groups of 16, 32 and 64.
    x = np.concatenate([rows(1, 448)[0], 1e-4 * rows(1, 64)[0], 100 * rows(1, 64)[0]]).astype(np.float32)
    close(butterflies(x), x @ hadamard(64), 1e-4 * np.abs(x).max(), "the rotation, added in another order")
    with tempfile.TemporaryDirectory() as folder:
        program = Path(folder) / "library_rows"
        subprocess.run([compiler, "-std=c++20", "-O1", "-ffp-contract=off", f"-I{HERE.parents[1] / 'include'}", HERE / "library_rows.cpp",
                        "-o", program], check=True)
        for bits, (per, group), turn in itertools.product((2, 3, 4, 5, 6, 8), (("row", 32), ("row", 64), ("channel", 16), ("channel", 64)),
                                                          ("plain", "rotated")):
            done = subprocess.run([program, str(bits), str(group), per, turn], input=x.tobytes(), stdout=subprocess.PIPE, check=True)
            theirs = np.frombuffer(done.stdout, np.float32).reshape(x.shape)
            what = f"{bits} bits, groups of {group} in a {per}, {turn}"
            ours = coders.affine(bits, group, per).restore
            if turn == "plain":
                same(ours(x[None])[0], theirs, what)
                continue
            same(butterflies(ours(butterflies(x)[None])[0]), theirs, what)
            # The reference adds in another order, so a number that lies halfway between two codes may get the other one.
            by_matrix = coders.affine(bits, group, per, rotated=True).restore(x[None])[0]
            if np.mean(np.abs(by_matrix - theirs) > 1e-4 * np.abs(x).max(axis=1, keepdims=True)) > 0.01:
                raise AssertionError(f"{what}: the reference's rotation gives other rows")
    return "2 to 8 bits, per row and per channel, rotated or not, bit for bit"


def as_gguf():
    from gguf import GGMLQuantizationType, quants
    x = np.concatenate([rows(count=4000).reshape(-1, 32), np.zeros((1, 32), np.float32), 1e-3 * rows(1, 50).reshape(-1, 32)])
    for kind, coder in (("Q8_0", coders.q8_0()), ("Q4_0", coders.q4_0()), ("Q4_1", coders.q4_1())):
        kind = getattr(GGMLQuantizationType, kind)
        theirs = quants.dequantize(quants.quantize(x, kind), kind)
        same(coder.restore(x[None])[0], theirs, f"gguf's {kind.name}")
    kind = getattr(GGMLQuantizationType, "MXFP4", None)
    if kind is None:
        return "q8_0, q4_0, q4_1 bit for bit"
    # gguf looks for the nearest number, and takes the smaller code where two are as near: compare where that is no tie.
    ours, theirs = coders.mxfp4().restore(x[None])[0], quants.dequantize(quants.quantize(x, kind), kind)
    differ = ours != theirs
    close(np.abs(ours - x)[differ], np.abs(theirs - x)[differ], 1e-6, "gguf's MXFP4 where it differs")
    if not differ.any():
        return "q8_0, q4_0, q4_1, MXFP4 bit for bit"
    return f"q8_0, q4_0, q4_1 bit for bit; MXFP4 but for {differ.sum()} of {differ.size:,} numbers, all halfway between two"


def as_ml_dtypes():
    import ml_dtypes
    x = np.concatenate([RANDOM.standard_normal(200000) * scale for scale in (1e-3, 1, 100)]).astype(np.float32)
    x = np.concatenate([x, np.arange(-8, 8, 2.0 ** -10, dtype=np.float32)])
    within = x[np.abs(x) <= 448]
    same(e4m3(within), within.astype(ml_dtypes.float8_e4m3fn).astype(np.float32), "ml_dtypes' float8_e4m3fn")
    done = "float8_e4m3fn"
    if hasattr(ml_dtypes, "float4_e2m1fn"):
        within = x[np.abs(x) <= 6]
        same(e2m1(within), within.astype(ml_dtypes.float4_e2m1fn).astype(np.float32), "ml_dtypes' float4_e2m1fn")
        done += " and float4_e2m1fn"
    return f"{done} bit for bit"


def main():
    if sys.argv[1:]:
        print(__doc__)
        sys.exit(0 if sys.argv[1:] in (["-h"], ["--help"]) else 2)
    for check in (halves, tables, affine_bounds, by_hand, rotations, level_tables, bits_counted, exact_rows, head_widths,
                  worse_with_fewer_bits):
        check()
        print(f"{check.__name__}: as it should be")
    print(f"the library's storage: {as_library()}")
    for package, check in (("gguf", as_gguf), ("ml_dtypes", as_ml_dtypes)):
        try:
            __import__(package)
        except ImportError:
            print(f"{package}: skipped, the package is not installed")
            continue
        print(f"{package}: {check()}")


if __name__ == "__main__":
    main()
