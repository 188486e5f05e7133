#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Bytes of the cache and time of a token, of llama2.c as it is and edited, after texts of several lengths.

  bench.py --source RUN_C --library libkvpolicy_compiled.so --checkpoint smollm2.bin --out FILE.json

The original is compiled in the three ways of that engine's README (-O3; -Ofast -march=native; and OpenMP besides), the
edited program in the latter two. All programs take turns, a process for each length in each round, so that a
change of the machine's load meets all of them. The edited program with every row kept in float must find the
same likeliest tokens as the original, or nothing is written. `0` rows are what the rest of the model costs.

Rows of the text are random numbers (time_decode.c), so a plan's time is measured, not what it does to answers. The
heads of `duo` are those of --pattern, or else every second head, which takes the same time.
"""
import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
from datetime import datetime, timezone
from pathlib import Path

import engine

FAST = ["-Ofast", "-march=native", "-fopenmp"]
ONE = FAST[:2]  # without OpenMP: one thread
DUO = "duo@{pattern}/:0.5"
# (name, flags, plan, bits of exact rows); without a plan it is the original program.
CASES = [("original, -O3", ["-O3"], None, 0), ("original, one thread", ONE, None, 0),
         ("every row in float, one thread", ONE, "full", 32), ("every row, one thread", ONE, "full", 16),
         ("duo, one thread", ONE, DUO, 16), ("original", FAST, None, 0), ("every row in float", FAST, "full", 32),
         ("every row", FAST, "full", 16), ("int8", FAST, "int8", 16), ("int4", FAST, "int4", 16),
         ("duo", FAST, DUO, 16), ("duo, int4", FAST, DUO.replace("duo", "duo+int4"), 16)]


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.partition(":")[2].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or "unknown processor"


def run(program, checkpoint, rows, tokens, plan, bits, flags):
    command = [program, checkpoint, str(rows), str(tokens)] + ([plan, str(bits)] if plan else [])
    # The library has threads of its own, whatever the engine is compiled with.
    environment = os.environ if "-fopenmp" in flags else dict(os.environ, OMP_NUM_THREADS="1")
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    if done.returncode != 0:
        sys.exit(f"{' '.join(map(str, command))}: {done.stderr.strip()}")
    return json.loads(done.stdout)


def every_second_head(folder, shape):
    folder.mkdir()
    heads = shape["kv_heads"]
    (folder / "full_attention_heads.tsv").write_text("".join(
        "\t".join(str((layer * heads + head) % 2) for head in range(heads)) + "\n" for layer in range(shape["layers"])))
    (folder / "config.json").write_text('{"sink_size": 128, "recent_size": 256}')
    return folder


def quantile(numbers, share):
    ordered = sorted(numbers)
    return ordered[round(share * (len(ordered) - 1))]


def build_all(arguments, folder):
    """{(flags, adopted): program}"""
    edited = folder / "run_edited.c"
    changed = engine.adopt(arguments.source, edited)
    programs = {}
    for _, flags, plan, _ in CASES:
        key = (*flags, bool(plan))
        if key in programs:
            continue
        source = edited if plan else arguments.source.resolve()
        more = [f'-DRUN_C="{source}"'] + (["-DADOPTED"] if plan else [])
        programs[key] = engine.build([arguments.compiler], engine.FOLDER / "time_decode.c",
                                     folder / f"program_{len(programs)}", flags + more,
                                     arguments.library if plan else None)
    return programs, changed


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--source", type=Path, required=True, help="llama2.c's run.c")
    parser.add_argument("--library", type=Path, required=True, help="kvpolicy's compiled library, .so or .a")
    parser.add_argument("--checkpoint", type=Path, required=True, help="a model, as convert.py writes it")
    parser.add_argument("--model", help="its name in the results (default: the checkpoint's)")
    parser.add_argument("--rows", type=int, nargs="+", default=[512, 2048, 8192], help="tokens of the text")
    parser.add_argument("--tokens", type=int, default=16, help="tokens that are timed in each run")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--pattern", type=Path, help="DuoAttention pattern of the model")
    parser.add_argument("--compiler", default="gcc")
    parser.add_argument("--out", type=Path, help="JSON; default: standard output")
    arguments = parser.parse_args()
    arguments.library = arguments.library.resolve()
    # Waiting OpenMP threads give up soon, as in all benches here; both programs are run this way.
    os.environ.setdefault("GOMP_SPINCOUNT", "10000")
    with tempfile.TemporaryDirectory() as holder:
        folder = Path(holder)
        try:
            programs, changed = build_all(arguments, folder)
        except RuntimeError as why:
            sys.exit(str(why))
        probe = run(programs[(*FAST, False)], arguments.checkpoint, 0, 1, None, 0, FAST)
        pattern = arguments.pattern or every_second_head(folder / "pattern", probe)
        # The last tokens that the model has room for, where a length is all of it.
        lengths = [min(rows, probe["seq_len"] - arguments.tokens - 2) for rows in [0, *arguments.rows]]
        if len(set(lengths)) != len(lengths):
            parser.error(f"the model has room for {probe['seq_len']} tokens: --rows must be smaller")
        found = {}
        for number in range(arguments.rounds):
            for rows in lengths:
                for name, flags, plan, bits in CASES:
                    own = run(programs[(*flags, bool(plan))], arguments.checkpoint, rows, arguments.tokens,
                              plan and plan.format(pattern=pattern), bits, flags)
                    found.setdefault((name, rows), []).append(own)
                    print(f"round {number + 1} of {arguments.rounds}, {rows} rows, {name}: "
                          f"{statistics.median(own['ms']):.1f} ms", file=sys.stderr)
                expected = found["original, -O3", rows][0]["likeliest"]
                for name in ("every row in float, one thread", "every row in float"):
                    if found[name, rows][-1]["likeliest"] != expected:
                        sys.exit(f"{name}: after {rows} rows the edited program finds other tokens than the original")
        compiler = subprocess.run([arguments.compiler, "--version"], capture_output=True, text=True).stdout.split("\n")[0]
    cases = []
    for (name, rows), runs in found.items():
        times = [ms for own in runs for ms in own["ms"]]
        median = statistics.median(times)
        cases.append({"name": name, "rows": rows, "ms": round(median, 3), "ms_p10": round(quantile(times, 0.1), 3),
                      "ms_p90": round(quantile(times, 0.9), 3), "tokens_per_second": round(1000 / median, 2),
                      "cache_bytes": runs[0]["cache_bytes"]})
    shape = {key: probe[key] for key in ("layers", "q_heads", "kv_heads", "head_dim", "seq_len")}
    context = {"cpu": cpu_name(), "num_cpus": os.cpu_count(), "date": datetime.now(timezone.utc).isoformat("T", "seconds"),
               "load_at_end": round(os.getloadavg()[0], 2), "compiler": compiler, "changed_lines": changed,
               "model": arguments.model or arguments.checkpoint.stem, "shape": shape, "rounds": arguments.rounds,
               "tokens_a_run": arguments.tokens, "pattern": arguments.pattern.name if arguments.pattern else
               "every second head, 128 sinks and 256 recent rows",
               "command": f"bench.py --rows {' '.join(map(str, arguments.rows))} --tokens {arguments.tokens} "
                          f"--rounds {arguments.rounds}",
               "flags": {name: " ".join(flags) for name, flags, _, _ in CASES},
               "plans": {name: plan.format(pattern="PATTERN") + f" -b {bits}" for name, _, plan, bits in CASES if plan}}
    text = json.dumps({"context": context, "benchmarks": cases}, indent=1) + "\n"
    if arguments.out:
        arguments.out.write_text(text, encoding="utf-8")
    else:
        print(text, end="")


if __name__ == "__main__":
    main()
