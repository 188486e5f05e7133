# SPDX-License-Identifier: Apache-2.0
"""Reads what attention_cpu_bench and bench/peers_cpu_torch.py have written, for bench/compare.py,
bench/targets_cpu.py, bench/plot_cpu.py and bench/tables.py. Standard library only."""
import json
import re
import sys

MILLISECONDS = {"ns": 1e-6, "us": 1e-3, "ms": 1.0, "s": 1e3}


def read(path):
    """(context, entries) of a file that a bench has written, whole or stopped."""
    try:
        with open(path, encoding="utf-8") as file:
            text = file.read()
        try:
            results = json.loads(text)
        except ValueError:
            # The bench was stopped, and its file ends after some case.
            results = json.loads(text[:text.rindex("\n    }") + 6] + "]}")
        return results.get("context", {}), results["benchmarks"]
    except (OSError, ValueError, KeyError, TypeError) as why:
        sys.exit(f"{path} cannot be read: {type(why).__name__}: {why}")


def fastest(entries):
    """{case: its fastest entry}; a case that was refused has no "ms"."""
    cases = {}
    for entry in entries:
        name = re.sub(r"/(iterations:\d+|manual_time)", "", entry["name"])
        if entry.get("error_occurred") or "refused" in entry:
            cases.setdefault(name, {})
            continue
        own = dict(entry)
        if "ms" not in own and "us" in own:  # attention_cuda_bench
            own.update({"ms" + key[2:]: own[key] / 1e3
                        for key in ("us", "us_p10", "us_p90") if key in own})
        if "ms" not in own and "real_time" in own:  # any other Google Benchmark
            own["ms"] = own["real_time"] * MILLISECONDS[own.get("time_unit", "ns")]
        if own.get("ms", 0) > 0 and own["ms"] < cases.get(name, {}).get("ms", float("inf")):
            cases[name] = own
    return cases


def load(path):
    """(context, {case: its fastest entry}); a case that was refused has no "ms"."""
    context, entries = read(path)
    return context, fastest(entries)


def load_repetitions(path):
    """(context, [{case: entry} of each repetition])"""
    context, entries = read(path)
    repetitions = {}
    for entry in entries:
        repetitions.setdefault(entry.get("repetition_index", 0), []).append(entry)
    return context, [fastest(own) for own in repetitions.values()]


def number(value, digits=3):
    """Three digits, without an exponent."""
    if value is None:
        return ""
    if abs(value) >= 10 ** (digits - 1):
        return f"{value:,.0f}"
    return f"{value:.{digits}g}" if abs(value) >= 1e-3 else f"{value:.1e}"


def disturbed(cases):
    """How much of the processor others had while the cases ran, or None if that was little."""
    shares = [entry["others_percent"] for entry in cases.values() if "others_percent" in entry]
    if not shares or sum(shares) / len(shares) <= 5:
        return None
    return f"BUSY MACHINE: others took {sum(shares) / len(shares):.0f} % of its time"


def facts(context, cases=None):
    """One line on where and how a file was measured."""
    known = [context.get("cpu") or context.get("device"),
             f"{context['cores']} threads at most" if "cores" in context else None,
             f"compiled for {context['target']}" if "target" in context else None,
             f"prompts in {context['prompts_in']}" if "prompts_in" in context else None,
             f"PyTorch {context['torch']}" if "torch" in context else None, context.get("date")]
    reads = [f"{float(value):.1f} GB/s ({key.rsplit('_', 1)[1]} threads)"
             for key, value in sorted(context.items()) if key.startswith("read_GB_per_s")]
    if reads:
        known.append("reads " + ", ".join(reads))
    if context.get("smoke") == "yes":
        known.append("A SMOKE RUN: its times mean nothing")
    if context.get("quick") == "yes":
        known.append("a quick run")
    if context.get("cached") == "yes":
        known.append("rows in cache")
    known.append(disturbed(cases or {}))
    return "; ".join(fact for fact in known if fact)
