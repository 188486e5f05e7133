#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""ggml's attention (the library under llama.cpp) on the shapes of attention_cpu_bench, timed the same way, in the same
layout of results: bench/compare.py joins both by the names of the cases.

  bench/peers_cpu_ggml.py --library FOLDER --out ggml.json      (./scripts/bench --peers --ggml FOLDER runs it)
  bench/compare.py ggml.json ours.json --names ggml ours

FOLDER has libggml-base and libggml-cpu, shared: an installed ggml, a build of it or of llama.cpp, or the lib folder of the
Python package llama_cpp, which compiles them when it is installed. Needs numpy.

One ggml_flash_attn_ext of a layer, head_dim 128, queries in float32, rows in half, q8_0 and q4_0, which stand beside our f16,
int8 and int4. A graph and its memory are made beforehand. As in our bench the caches are cold: calls go round over rows
that together are four times the third-level cache. Results are checked against float64. Nothing is appended: ours
takes up a row with each step. llama.cpp rotates queries, keys and values beforehand where rows are quantised; that
is not in these times, and it is in ours.
"""
import ctypes
import sys
from pathlib import Path

from peers_cpu import CHUNK, HEAD_DIM, KI, arguments, l3_bytes, least_samples, refused, run, samples_of, timed

# Type by ggml's number, its name there, and the case of ours that it stands beside; how far results may be off: the
# rounding of quantised rows is theirs. (A decode step over half rows adds up values in half and is refused for it.)
TYPES = {"f16": (1, "f16", 6e-3), "default_int8": (8, "q8_0", 2e-2), "default_int4": (2, "q4_0", 0.3)}
F32, F16 = 0, 1


class InitParams(ctypes.Structure):
    _fields_ = [("mem_size", ctypes.c_size_t), ("mem_buffer", ctypes.c_void_p), ("no_alloc", ctypes.c_bool)]


class Plan(ctypes.Structure):
    # Versions differ in what follows; it stays zero, and there is room for it.
    _fields_ = [("work_size", ctypes.c_size_t), ("work_data", ctypes.c_void_p), ("threads", ctypes.c_int),
                ("rest", ctypes.c_uint64 * 32)]


class Ggml:
    """The functions that are called, from the shared libraries of a folder."""

    def __init__(self, folder):
        found = {}
        for name in ("ggml-base", "ggml-cpu"):
            paths = sorted(Path(folder).rglob(f"lib{name}*.so*")) + sorted(Path(folder).rglob(f"lib{name}*.dylib"))
            if not paths:
                sys.exit(f"peers_cpu_ggml.py: no lib{name} in {folder}; build ggml with -DBUILD_SHARED_LIBS=ON, or name the "
                         "folder that has it by --library")
            found[name] = ctypes.CDLL(str(paths[0]), mode=ctypes.RTLD_GLOBAL)
        base, cpu = found["ggml-base"], found["ggml-cpu"]
        pointer, number, count = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        self.init = self.of(base, "ggml_init", pointer, InitParams)
        self.free = self.of(base, "ggml_free", None, pointer)
        self.tensor = self.of(base, "ggml_new_tensor_3d", pointer, pointer, number, count, count, count)
        self.data = self.of(base, "ggml_get_data", pointer, pointer)
        self.bytes = self.of(base, "ggml_nbytes", ctypes.c_size_t, pointer)
        self.attention = self.of(base, "ggml_flash_attn_ext", pointer, *[pointer] * 5, *[ctypes.c_float] * 3)
        self.graph = self.of(base, "ggml_new_graph", pointer, pointer)
        self.expand = self.of(base, "ggml_build_forward_expand", None, pointer, pointer)
        self.quantize = self.of(base, "ggml_quantize_chunk", ctypes.c_size_t, number, pointer, pointer, count, count, count,
                                pointer)
        self.plan = self.of(cpu, "ggml_graph_plan", Plan, pointer, number, pointer)
        self.compute = self.of(cpu, "ggml_graph_compute", number, pointer, ctypes.POINTER(Plan))
        self.cpu_init = self.of(cpu, "ggml_cpu_init", None)
        self.cpu_init()
        try:
            self.version = self.of(base, "ggml_version", ctypes.c_char_p)().decode()
        except AttributeError:  # an older one does not say
            self.version = "unknown"

    @staticmethod
    def of(library, name, result, *parameters):
        function = getattr(library, name)
        function.restype, function.argtypes = result, parameters
        return function


class Layer:
    """The attention of one layer: its tensors, and the graph that computes it."""

    def __init__(self, ggml, np, kind, q, k, v, causal):
        self.ggml, self.np = ggml, np
        queries, rows = q.shape[1], k.shape[1]
        mask_bytes = 2 * rows * queries if causal else 0
        self.context = ggml.init(InitParams(2 * k.nbytes + 4 * q.nbytes + mask_bytes + (16 << 20), None, False))
        number = TYPES[kind][0]
        tensors = [self.filled(F32, q), self.filled(number, k), self.filled(number, v)]
        mask = None
        if causal:
            seen = np.arange(rows)[None, :] <= np.arange(rows - queries, rows)[:, None]
            mask = self.filled(F16, np.where(seen, 0, -np.inf).astype(np.float32)[None])
        self.out = ggml.attention(self.context, *tensors, mask, HEAD_DIM ** -0.5, 0.0, 0.0)
        self.graph = ggml.graph(self.context)
        ggml.expand(self.graph, self.out)
        self.out_shape = (queries, q.shape[0], HEAD_DIM)
        self.set_threads(1)

    def filled(self, number, values):
        """A tensor of ggml's shape [channels, rows, heads], which is numpy's [heads, rows, channels]."""
        np, ggml = self.np, self.ggml
        heads, rows, channels = values.shape
        tensor = ggml.tensor(self.context, number, channels, rows, heads)
        to = ggml.data(tensor)
        if number in (F32, F16):
            values = np.ascontiguousarray(values, dtype=np.float32 if number == F32 else np.float16)
            ctypes.memmove(to, values.ctypes.data, values.nbytes)
        else:
            values = np.ascontiguousarray(values, dtype=np.float32)
            ggml.quantize(number, values.ctypes.data, to, 0, heads * rows, channels, None)
        self.held = getattr(self, "held", 0) + ggml.bytes(tensor)
        return tensor

    def set_threads(self, threads):
        self.plan = self.ggml.plan(self.graph, threads, None)
        self.work = ctypes.create_string_buffer(self.plan.work_size + 64)
        self.plan.work_data = ctypes.addressof(self.work)

    def __call__(self):
        if self.ggml.compute(self.graph, ctypes.byref(self.plan)) != 0:
            raise RuntimeError("ggml_graph_compute failed")

    def result(self):
        count = self.out_shape[0] * self.out_shape[1] * HEAD_DIM
        numbers = (ctypes.c_float * count).from_address(self.ggml.data(self.out))
        return self.np.array(numbers, dtype=self.np.float64).reshape(self.out_shape)

    def close(self):
        self.ggml.free(self.context)


def cases(quick):
    """(name in our bench without threads, kind, query heads, KV heads, queries, rows)"""
    for rows in [16 * KI] if quick else [4 * KI, 16 * KI, 64 * KI]:
        for kind in TYPES:
            yield f"decode/{kind}/32x8/{rows // KI}Ki", kind, 32, 8, 1, rows
    for rows in [4 * KI] if quick else [4 * KI, 16 * KI]:
        for kind in TYPES:
            yield f"prefill/{kind}/32x8/{rows // KI}Ki", kind, 32, 8, CHUNK, rows


def error_of(np, out, q, k, v):
    """The largest error, for a few query heads of the last query, against float64."""
    group, worst = q.shape[0] // k.shape[0], 0.0
    for head in (0, q.shape[0] - 1):
        keys, values = k[head // group].astype(np.float64), v[head // group].astype(np.float64)
        logits = keys @ q[head, -1].astype(np.float64) / HEAD_DIM ** 0.5
        weights = np.exp(logits - logits.max())
        right = weights @ values / weights.sum()
        worst = max(worst, float(np.linalg.norm(out[-1, head] - right) / np.linalg.norm(right)))
    return worst


def measure(ggml, np, args, cold_bytes, case, threads):
    name, kind, q_heads, kv_heads, queries, rows = case
    _, how, most_error = TYPES[kind]
    random = np.random.default_rng(1)

    def numbers(heads, tokens):
        return ((random.random((heads, tokens, HEAD_DIM), dtype=np.float32) - 0.5) * np.float32(12 ** 0.5))

    k, v, q = numbers(kv_heads, rows), numbers(kv_heads, rows), numbers(q_heads, queries)
    layers = [Layer(ggml, np, kind, q, k, v, queries > 1)]
    bytes_read = float(layers[0].held - q.nbytes - (2 * rows * queries if queries > 1 else 0))
    entry = {"name": name, "backend": "ggml", "how": how, "layers": 1, "rows": rows}
    try:
        layers[0]()
        entry["error"] = error_of(np, layers[0].result(), q, k, v)
        if not entry["error"] <= most_error:
            raise RuntimeError(f"wrong result, off by {entry['error']:.3g}")
    except RuntimeError as why:
        layers[0].close()
        return [refused(entry, why)]
    wanted = int(max(1, -(-cold_bytes // bytes_read))) if queries == 1 else 1
    while len(layers) < wanted:
        layers.append(Layer(ggml, np, kind, q, k, v, False))
    entry["layers"] = len(layers)
    results = []
    for count in threads:
        for layer in layers:
            layer.set_threads(count)
        times = samples_of(layers, args.seconds, least_samples(queries, args.quick))
        results.append(timed(entry, name, count, times, q_heads, queries, rows, bytes_read))
    for layer in layers:
        layer.close()
    return results


def main():
    args = arguments(__doc__, lambda parser: parser.add_argument(
        "--library", default="/usr/local/lib", metavar="FOLDER", help="where the shared libraries are (default: %(default)s)"))
    try:
        import numpy as np
    except ImportError:
        sys.exit("peers_cpu_ggml.py: there is no numpy here (pip install numpy, or name the Python that has it)")
    ggml = Ggml(args.library)
    cold = 4 * l3_bytes()
    run(args, cases(args.quick), lambda case, threads: measure(ggml, np, args, cold, case, threads),
        {"ggml": ggml.version})


if __name__ == "__main__":
    main()
