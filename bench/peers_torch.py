#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""PyTorch's attention on the shapes of attention_cuda_bench, timed the same way; one table of both.

  bench/peers_torch.py --out peers.json                     times PyTorch (needs torch and a GPU)
  bench/peers_torch.py --join ours.json peers.json          prints the table, and what was to be
                                                            reached
  bench/peers_torch.py --join ours.json --table table.md    ours alone, written to a file as well

scaled_dot_product_attention runs on its flash and cuDNN backends, bfloat16, head_dim 128. As in our
bench: before each sample a buffer of four times the second-level cache is written, times are of
events around a CUDA graph, the median of at least 50 counts; small cases take several layers, each
with rows of its own. For fewer KV heads than query heads each backend is tried in every way
a caller has, and the fastest counts: `gqa` (enable_gqa), `folded` (decode: the query heads of a group
as rows of one head), `repeat` (keys and values expanded, not timed). Results are checked
against float64.
"""
import argparse
import json
import re
import sys
from pathlib import Path

HEAD_DIM = 128
KI = 1024
BYTES_OF_SAMPLE = 256e6
MOST_LAYERS = 16
# Limit of |out - reference| / |reference|, as in our bench.
MOST_ERROR = 6e-3


def tokens_name(tokens):
    return f"{tokens // KI}Ki" if tokens % KI == 0 else str(tokens)


def cases():
    """(name in our bench, sequences, query heads, KV heads, queries, rows)"""
    found = []
    for q_heads, kv_heads in [(32, 32), (32, 8), (32, 4)]:
        for tokens in [64 * KI, 128 * KI, 256 * KI, 512 * KI]:
            name = f"decode/dense/{q_heads}x{kv_heads}/{tokens_name(tokens)}"
            found.append((name, 1, q_heads, kv_heads, 1, tokens))
    found.append(("decode/dense/32x8/517000", 1, 32, 8, 1, 517000))
    found.append(("decode/dense/32x32/134000", 1, 32, 32, 1, 134000))
    found.append(("decode/batch_64/32x4/8Ki", 64, 32, 4, 1, 8 * KI))
    for tokens in [16 * KI, 64 * KI]:
        name = f"prefill/dense/32x8/{tokens_name(tokens)}"
        found.append((name, 1, 32, 8, tokens, tokens))
    return found


# ---- timing PyTorch ------------------------------------------------------------------------------


def variants(torch, q, k, v, decode):
    """(how, function of no arguments that attends) for each way to attend with fewer KV heads."""
    attention = torch.nn.functional.scaled_dot_product_attention
    group = q.shape[1] // k.shape[1]
    causal = not decode
    if group == 1:
        return [("plain", lambda: attention(q, k, v, is_causal=causal))]
    ways = [("gqa", lambda: attention(q, k, v, is_causal=causal, enable_gqa=True))]
    if decode:
        batch, _, _, dim = q.shape
        folded = q.view(batch, k.shape[1], group, dim)
        ways.append(("folded", lambda: attention(folded, k, v).view(q.shape)))
    expanded = []

    def repeat():
        if not expanded:  # once, outside the timed part
            expanded.extend(t.repeat_interleave(group, dim=1) for t in (k, v))
        return attention(q, *expanded, is_causal=causal)

    ways.append(("repeat", repeat))
    return ways


def error_of(torch, out, q, k, v):
    """The largest error, for a few query heads of the last query of the last sequence, against float64."""
    group = q.shape[1] // k.shape[1]
    worst = 0.0
    for head in (0, q.shape[1] - 1):
        keys, values = (t[-1, head // group].double() for t in (k, v))
        weights = torch.softmax(keys @ q[-1, head, -1].double() / HEAD_DIM**0.5, 0)
        right = weights @ values
        off = (out[-1, head, -1].double() - right).norm() / right.norm()
        worst = max(worst, off.item())
    return worst


class Clock:
    """Times work by events, with a flushed second-level cache."""

    def __init__(self, torch):
        self.torch = torch
        properties = torch.cuda.get_device_properties(0)
        self.flushed = torch.empty(4 * properties.L2_cache_size, dtype=torch.uint8, device="cuda")

    def sample(self, work):
        begin, end = (self.torch.cuda.Event(enable_timing=True) for _ in range(2))
        self.flushed.fill_(1)
        begin.record()
        work()
        end.record()
        end.synchronize()
        return begin.elapsed_time(end) * 1e3

    def samples(self, attend, count):
        torch = self.torch
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(3):
                attend()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph, stream=stream):
                attend()
            for _ in range(3):
                self.sample(graph.replay)
            times = sorted(self.sample(graph.replay) for _ in range(count))
        torch.cuda.synchronize()
        return times


def measure(torch, clock, case, samples):
    from torch.nn.attention import SDPBackend, sdpa_kernel

    name, sequences, q_heads, kv_heads, queries, rows = case
    decode = queries == 1
    bytes_read = 4.0 * sequences * kv_heads * rows * HEAD_DIM
    layers = int(max(1, min(MOST_LAYERS, BYTES_OF_SAMPLE // bytes_read))) if decode else 1
    results = []
    for backend_name in ("FLASH_ATTENTION", "CUDNN_ATTENTION"):
        backend = getattr(SDPBackend, backend_name, None)
        if backend is None:
            continue

        def numbers(heads, tokens):
            shape = (sequences, heads, tokens, HEAD_DIM)
            even = torch.rand(shape, dtype=torch.bfloat16, device="cuda")
            return even.sub_(0.5).mul_(12**0.5)

        tensors = [(numbers(q_heads, queries), numbers(kv_heads, rows), numbers(kv_heads, rows))
                   for _ in range(layers)]
        ways = [variants(torch, *layer, decode) for layer in tensors]
        for number, (how, _) in enumerate(ways[0]):
            entry = {"name": name, "backend": backend_name.split("_")[0].lower(), "how": how,
                     "layers": layers}
            try:
                with sdpa_kernel([backend]):
                    entry["error"] = error_of(torch, ways[0][number][1](), *tensors[0])
                    if not entry["error"] <= MOST_ERROR:
                        raise RuntimeError(f"wrong result, off by {entry['error']:.3g}")

                    def attend(number=number):
                        for way in ways:
                            way[number][1]()

                    times = clock.samples(attend, samples)
                entry.update(us=times[len(times) // 2] / layers, samples=len(times),
                             us_p10=times[len(times) // 10] / layers,
                             us_p90=times[len(times) * 9 // 10] / layers)
                print(f"  {name:32} {entry['backend']:6} {how:7} {entry['us']:12.1f} us",
                      flush=True)
            except Exception as why:  # pylint: disable=broad-except  # a backend may refuse a shape
                entry["refused"] = str(why).splitlines()[0] if str(why) else type(why).__name__
                print(f"  {name:32} {entry['backend']:6} {how:7} refused: {entry['refused'][:80]}",
                      flush=True)
            results.append(entry)
        del tensors, ways
        torch.cuda.empty_cache()
    return results


def time_peers(args):
    try:
        import torch
    except ImportError:
        sys.exit("peers_torch.py: there is no PyTorch here (pip install torch); --join works without")
    if not torch.cuda.is_available():
        sys.exit("peers_torch.py: PyTorch sees no CUDA device; --join works without one")
    clock = Clock(torch)
    context = {"device": torch.cuda.get_device_name(0), "torch": torch.__version__,
               "cuda": torch.version.cuda, "cudnn": torch.backends.cudnn.version()}
    found = []
    for case in cases():
        if not re.search(args.filter, case[0]):
            continue
        try:
            found += measure(torch, clock, case, args.samples)
        except torch.cuda.OutOfMemoryError:
            found.append({"name": case[0], "refused": "does not fit in this device's memory"})
            torch.cuda.empty_cache()
        # Written after each case, so that results are kept if time runs out.
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"context": context, "benchmarks": found}, file, indent=1)
            file.write("\n")
    print(f"written to {args.out}")


# ---- joining -------------------------------------------------------------------------------------

# The goals on an H100; bench/tables.py shows the same goals in docs/performance.md.
GOALS = json.loads((Path(__file__).parent / "targets_cuda.json").read_text(encoding="utf-8"))


def load(path):
    try:
        with open(path, encoding="utf-8") as file:
            return parsed(file.read(), path)
    except OSError as why:
        sys.exit(f"peers_torch.py: {path} cannot be read: {why}")


def parsed(text, name):
    """A bench's results; one that was stopped ends after some case."""
    try:
        try:
            results = json.loads(text)
        except ValueError:
            results = json.loads(text[:text.rindex("\n    }") + 6] + "]}")
        results["context"].items()
        for case in results["benchmarks"]:
            case["name"].strip()
        return results
    except (ValueError, KeyError, TypeError, AttributeError) as why:
        sys.exit(f"{name} is not what a bench writes: {type(why).__name__}: {why}")


def case_name(entry):
    # Google Benchmark appends the number of iterations to the name.
    return re.sub(r"/(iterations:\d+|manual_time)", "", entry["name"])


def number(value, digits=3):
    return "" if value is None else f"{value:.{digits}g}" if abs(value) < 1000 else f"{value:,.0f}"


def rows_of(ours, peers):
    fastest, flash = {}, {}
    for entry in peers.get("benchmarks", []):
        if "us" not in entry:
            continue
        for best, fits in ((fastest, True), (flash, entry["backend"] == "flash")):
            if fits and entry["us"] < best.get(entry["name"], {"us": float("inf")})["us"]:
                best[entry["name"]] = entry
    rows = []
    for entry in ours["benchmarks"]:
        row = dict(entry, case=case_name(entry))
        if "us" in row:
            for key, best in (("sdpa", fastest), ("sdpa_flash", flash)):
                peer = best.get(row["case"])
                if peer:
                    row[key] = peer["us"] / row["us"]
                    row[key + "_by"] = f"{peer['backend']} {peer['how']}"
        rows.append(row)
    return rows


def table_of(rows):
    head = ["case", "µs", "p10 to p90", "GB/s or TFLOP/s (tiles)", "% nominal", "% copy",
            "limit µs", "× dense or separate", "× SDPA"]
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    for row in rows:
        if row.get("error_occurred"):
            cells = [row["case"], row.get("error_message", "failed")] + [""] * (len(head) - 2)
        elif "us" not in row:
            continue
        else:
            if "GB_per_s" in row:
                rate, share = number(row["GB_per_s"], 4), row["percent_of_nominal"]
            else:
                rate = f"{number(row['TFLOP_per_s'])} ({number(row['tiles_TFLOP_per_s'])})"
                share = row.get("percent_of_peak")
            sdpa = f"{number(row['sdpa'])} ({row['sdpa_by']})" if "sdpa" in row else ""
            cells = [row["case"], number(row["us"], 4),
                     f"{number(row['us_p10'], 4)} to {number(row['us_p90'], 4)}", rate,
                     number(share), number(row.get("percent_of_copy")),
                     number(row.get("limit_us"), 4), number(row.get("speedup")), sdpa]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def verdict(judged, rows):
    """(worst case, whether it is good enough), as text; nothing if no case was measured."""
    found = [(row[judged["counter"]], row["case"]) for row in rows
             if re.fullmatch(judged["cases"], row["case"]) and judged["counter"] in row]
    if not found:
        return None
    worst, where = min(found)
    return f"{number(worst)}{unit_of(judged)} ({where})", "yes" if worst >= judged["at_least"] else "no"


def unit_of(judged):
    return judged.get("unit", " %" if judged["counter"].startswith("percent_of_") else "x")


def targets_of(rows):
    lines = ["| target | to reach | reached (worst case) | |", "| --- | --- | --- | --- |"]
    for judged in (one for goal in GOALS for one in goal.get("judged", [])):
        reached, good = verdict(judged, rows) or ("not measured", "")
        lines.append(f"| {judged['title']} | {judged['at_least']}{unit_of(judged)} | {reached} | {good} |")
    return lines


def join(args):
    ours = load(args.join[0])
    peers = load(args.join[1]) if len(args.join) > 1 else {}
    context = ours.get("context", {})
    rows = rows_of(ours, peers)
    nominal, copy, empty = (number(float(context.get(key, 0)), 4)
                            for key in ("nominal_GB_per_s", "copy_GB_per_s", "empty_sample_us"))
    facts = [f"{context.get('device', 'unknown device')}, {context.get('target', '')}, "
             f"{context.get('date', '')}; nominal {nominal} GB/s, a copy reaches {copy}; "
             f"an empty sample takes {empty} µs"]
    if peers:
        facts.append(f"PyTorch {peers['context'].get('torch')}, "
                     f"CUDA {peers['context'].get('cuda')}, cuDNN {peers['context'].get('cudnn')} "
                     f"on {peers['context'].get('device')}")
        if peers["context"].get("device") != context.get("device"):
            facts.append("**Not taken on the same device: ratios to SDPA mean nothing.**")
    if context.get("smoke") == "yes":
        facts.append("**A smoke run: shapes are tiny, times mean nothing.**")
    text = "\n\n".join(facts) + "\n\n" + "\n".join(targets_of(rows)) + "\n\n" + \
        "\n".join(table_of(rows)) + "\n"
    print(text)
    if args.table:
        with open(args.table, "w", encoding="utf-8") as file:
            file.write(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="peers.json",
                        help="where the times go (default: %(default)s)")
    parser.add_argument("--samples", type=int, default=50,
                        help="timed launches of each (default: %(default)s)")
    parser.add_argument("--filter", default="",
                        help="only cases that this regular expression finds")
    parser.add_argument("--join", nargs="+", metavar="JSON",
                        help="results of attention_cuda_bench, then of this script: one table")
    parser.add_argument("--table", help="with --join: write the table to this file as well")
    args = parser.parse_args()
    if args.join and len(args.join) > 2:
        parser.error("--join takes one or two files")
    if args.join:
        join(args)
    else:
        time_peers(args)


if __name__ == "__main__":
    main()
