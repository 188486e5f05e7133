#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the C interface through cffi, which parses the header itself: the part of kvpolicy/c.h that other
languages see must be plain C. Prints why it is skipped and exits with 77 where cffi is missing.

usage: cffi_test.py HEADER LIBRARY
"""
import math
import random
import re
import sys
from pathlib import Path

try:
    import cffi
except ImportError:
    print("skipped: Python has no cffi (pip install cffi)")
    sys.exit(77)

PLAN = b"""{"format": "kvpolicy plan", "version": 1,
  "shape": {"layers": 2, "q_heads": 2, "kv_heads": 1, "head_dim": 64},
  "settings": [{"policy": "full"}, {"policy": "sink_recent", "sinks": 1, "recent": 3}],
  "heads": [[0], [1]]}"""
DIM, HEADS, TOKENS = 64, 2, 12


def declarations(header):
    text = re.sub(r"/\*.*?\*/", "", header.read_text(), flags=re.S)
    text = re.sub(r"^#ifdef __cplusplus.*?^#endif", "", text, flags=re.S | re.M)
    return re.sub(r"^#.*$", "", text, flags=re.M)


def attention(q, keys, values, seen):
    logits = [sum(a * b for a, b in zip(q, k)) / math.sqrt(DIM) for k in keys]
    weights = [math.exp(l) if s else 0.0 for l, s in zip(logits, seen)]
    total = sum(weights)
    return [sum(w * v[d] for w, v in zip(weights, values)) / total for d in range(DIM)]


def main(header, library):
    ffi = cffi.FFI()
    ffi.cdef(declarations(header))
    kvp = ffi.dlopen(str(library))

    def check(status):
        if status != kvp.KVP_OK:
            name = ffi.string(kvp.kvp_status_name(status)).decode()
            raise RuntimeError(name + ": " + ffi.string(kvp.kvp_error()).decode())

    plan_out = ffi.new("kvp_plan**")
    check(kvp.kvp_plan_from_json(PLAN, len(PLAN), kvp.KVP_FLOAT32, plan_out))
    plan = ffi.gc(plan_out[0], kvp.kvp_plan_free)
    cache_out = ffi.new("kvp_cache**")
    check(kvp.kvp_cache_new(plan, ffi.NULL, cache_out))
    cache = ffi.gc(cache_out[0], kvp.kvp_cache_free)

    draw = random.Random(7)
    numbers = lambda count: [draw.uniform(-1, 1) for _ in range(count)]
    worst = 0.0
    for layer in range(2):
        keys, values = [], []
        for token in range(TOKENS):
            q, k, v = numbers(HEADS * DIM), numbers(DIM), numbers(DIM)
            keys.append(k)
            values.append(v)
            memory = {name: ffi.new("float[]", data)
                      for name, data in (("q", q), ("k", k), ("v", v), ("out", HEADS * DIM))}
            tensors = [ffi.new("kvp_tensor*", {"data": memory[name], "dtype": kvp.KVP_FLOAT32,
                                               "tokens": 1, "heads": heads, "head_dim": DIM})
                       for name, heads in (("q", HEADS), ("k", 1), ("v", 1), ("out", HEADS))]
            check(kvp.kvp_cache_step(cache, layer, *tensors, ffi.NULL))
            seen = [layer == 0 or row < 1 or row > token - 3 for row in range(token + 1)]
            for head in range(HEADS):
                exact = attention(q[head * DIM:(head + 1) * DIM], keys, values, seen)
                for d in range(DIM):
                    off = abs(memory["out"][head * DIM + d] - exact[d])
                    worst = off if not off <= worst else worst
    assert worst < 1e-5, worst

    info = ffi.new("kvp_cache_info*", {"size": ffi.sizeof("kvp_cache_info")})
    check(kvp.kvp_cache_get_info(cache, info))
    assert info.tokens == TOKENS and info.bytes > 0
    try:
        check(kvp.kvp_cache_truncate(cache, 3))
    except RuntimeError as error:
        assert "RollbackError" in str(error) and "3" in str(error), error
    else:
        raise AssertionError("rows that are committed were taken back")
    print("cffi: all of it, largest difference %.1e" % worst)


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), Path(sys.argv[2]))
