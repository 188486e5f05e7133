# SPDX-License-Identifier: Apache-2.0
"""What the scripts that time other libraries on our bench's shapes share (peers_cpu_torch.py, peers_cpu_ggml.py): the
processor, how calls are timed, the command line, and the layout of results, which is that of attention_cpu_bench."""
import argparse
import json
import os
import re
import sys
import time

HEAD_DIM = 128
KI = 1024
CHUNK = 512


def l3_bytes():
    sizes = []
    for index in range(8):
        try:
            with open(f"/sys/devices/system/cpu/cpu0/cache/index{index}/size", encoding="ascii") as file:
                text = file.read().strip()
            sizes.append(int(text.rstrip("KMG")) << {"K": 10, "M": 20, "G": 30}.get(text[-1], 0))
        except (OSError, ValueError):
            pass
    return max(sizes, default=128 << 20)


def cpu_name():
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return "unknown processor"


def cores():
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def samples_of(calls, seconds, least):
    """Ascending seconds of single calls, which take the layers in turn."""
    for call in calls[:2]:
        call()
    times, begin, number = [], time.perf_counter(), 0
    while len(times) < least or time.perf_counter() - begin < seconds:
        start = time.perf_counter()
        calls[number % len(calls)]()
        times.append(time.perf_counter() - start)
        number += 1
    return sorted(times)


def least_samples(queries, quick):
    return 5 if queries > 1 else 10 if quick else 30


def timed(entry, name, threads, times, q_heads, queries, rows, bytes_read):
    """The entry with the times of one count of threads; says so, too."""
    def at(share):
        return times[round(share * (len(times) - 1))] * 1e3
    own = dict(entry, name=f"{name}/threads:{threads}", ms=at(0.5), ms_best=at(0), ms_p10=at(0.1), ms_p90=at(0.9),
               samples=len(times))
    if queries == 1:
        own.update(bytes=bytes_read, GB_per_s=bytes_read / at(0.5) * 1e-6)
        rate = f"{own['GB_per_s']:.1f} GB/s"
    else:
        seen = queries * (rows - (queries - 1) / 2)
        own["GFLOP_per_s"] = 4 * seen * q_heads * HEAD_DIM / at(0.5) * 1e-6
        rate = f"{own['GFLOP_per_s']:.0f} GFLOP/s"
    print(f"  {own['name']:38} {own['how']:7} {own['ms']:10.3f} ms ({own['ms_p10']:.3f} to {own['ms_p90']:.3f}), {rate}",
          flush=True)
    return own


def refused(entry, why):
    entry["refused"] = str(why).splitlines()[0]
    print(f"  {entry['name']:28} {entry['how']:7} refused: {entry['refused'][:70]}", flush=True)
    return entry


def arguments(description, add=None):
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", default="peers_cpu.json", help="where the times go (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=1.0, help="of samples for each case (default: %(default)s)")
    parser.add_argument("--filter", default=".", help="only cases that this regular expression finds")
    parser.add_argument("--quick", action="store_true", help="the cases of our bench's --quick")
    if add:
        add(parser)
    args = parser.parse_args()
    if args.quick:
        args.seconds = min(args.seconds, 0.25)
    return args


def run(args, cases, measure, facts):
    """measure(case, threads) of every case that the filter leaves, a case being a tuple that begins with its name. `facts`
    join the file's context. Results are written after each case, so that they are kept if time runs out."""
    most = cores()
    counts = [most] if args.quick or most == 1 else [1, most]
    context = {"cpu": cpu_name(), "cores": str(most), **facts, "date": time.strftime("%Y-%m-%dT%H:%M:%S%z"),
               "quick": "yes" if args.quick else "no"}
    found = []
    for case in cases:
        threads = [count for count in counts if re.search(args.filter, f"{case[0]}/threads:{count}")]
        if not threads:
            continue
        found += measure(case, threads)
        with open(args.out, "w", encoding="utf-8") as file:
            json.dump({"context": context, "benchmarks": found}, file, indent=1)
            file.write("\n")
    if not found:
        sys.exit(f"{os.path.basename(sys.argv[0])}: no case fits '{args.filter}'")
    print(f"written to {args.out}")
