# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/performance.md: goals, and how the benches' files meet them."""
import targets_cpu
from compare import by_kind, rows_of
from results_cpu import fastest, load, load_repetitions, number, read

from . import gpu_tables
from .markdown import table

# (what a column is called, its file), as `./scripts/bench --out` writes them.
CPU_RUNS = [("Intel with AMX, one run", "cpu_intel_xeon_processor_2core_tiles.json"),
            ("Intel with AMX, prompts once more", "cpu_intel_xeon_processor_2core_tiles_prompts.json"),
            ("Intel, one run", "cpu_intel_xeon_processor_2core.json"),
            ("Intel, five runs more", "cpu_intel_xeon_processor_2core_repeated.json"),
            ("AMD, two runs side by side", "cpu_amd_epyc_2core.json")]
INTEL = CPU_RUNS[0][1]
INTEL_TORCH = "cpu_intel_xeon_processor_2core_tiles_torch.json"
INTEL_GGML = "cpu_intel_xeon_processor_2core_tiles_ggml.json"


def cpu_machines(*paths):
    """Where and how the CPU files were measured."""
    rows = []
    for (title, _), path in zip(CPU_RUNS, paths):
        context, entries = read(path)
        others = [entry["others_percent"] for entry in entries if "others_percent" in entry]
        rows.append([f"[{title}](../bench/results/{path.name})", context["cpu"], context["target"],
                     context["prompts_in"], f"{context['l3_MiB']} MiB",
                     f"{number(float(context['read_GB_per_s_threads_2']))} GB/s", str(len(fastest(entries))),
                     f"{number(max(others))} %", context["date"][:10]])
    return table(["file", "processor, as the guest sees it", "compiled for", "prompts multiply in", "third-level cache",
                  "plain reads at the start, two threads", "cases", "others' part of the processor, at most",
                  "date"], rows, left=4)


def cpu_goals(*paths):
    runs = [load_repetitions(path) for path in paths]
    rows = [[goal["what"], targets_cpu.wanted(goal), goal.get("peer", "")]
            + [targets_cpu.cell(goal, *run) or "" for run in runs] for goal in targets_cpu.GOALS]
    titles = ["what", "to reach", "fastest CPU peer known"] + [title for title, _ in CPU_RUNS]
    return table(titles, rows, left=len(titles))


def cpu_peer(ours, theirs, name):
    """Another library's time over ours."""
    (_, own), (_, peers) = load(ours), load(theirs)
    rows = rows_of(peers, own, "")
    shown = {case: (f"{number(peer['ms'])} ms", f"{number(mine['ms'])} ms") for case, peer, mine, _ in rows}
    hows = {"/".join(case.split("/")[:2]): peer.get("how", "") for case, peer, _, _ in rows}
    lines = [line.split("|") for line in by_kind(rows)[2:]]
    made = []
    for _, kind, count, mean, least, most, _ in lines:
        kind = kind.strip()
        case = f"{kind}/32x8/{'64Ki' if 'decode' in kind else '16Ki'}/threads:2"
        beside = f" beside {hows[kind]}" if name == "ggml" else ""
        made.append([f"`{kind}`{beside}", count.strip(), mean.strip(), f"{least.strip()} to {most.strip()}", *shown.get(case, ("", ""))])
    return table(["kind", "cases", f"{name}'s time over ours, geometric mean", "over all cases", f"{name}, one case", "ours, the same"],
                 made)


def cpu_torch(ours, theirs):
    return cpu_peer(ours, theirs, "PyTorch")


def cpu_ggml(ours, theirs):
    return cpu_peer(ours, theirs, "ggml")


def cpu_speed(ours, theirs):
    """A decode step of each kind."""
    (_, (cases,)), (_, (peers,)) = load_repetitions(ours), load_repetitions(theirs)
    kinds = [("every row, bfloat16", "bf16"), ("every row, int4, one group a row", "int4"),
             ("DuoAttention, half of the heads streaming", "duo"), ("retrieval, 4,096 rows read", "retrieval"),
             ("HeadKV, 4,096 rows a head on average", "headkv")]

    def row(what, entry):
        return [what, f"{number(entry['ms'])} ms", f"{number(entry['ms_p10'])} to {number(entry['ms_p90'])} ms"]

    rows = [row(what, cases[f"decode/{kind}/32x8/64Ki/threads:2"]) for what, kind in kinds]
    rows.append(row("PyTorch, every row, bfloat16", peers["decode/bf16/32x8/64Ki/threads:2"]))
    return table(["decode step", "median", "10th to 90th percentile"], rows)


def model(*paths):
    """Reading a prompt and decoding after it, whole models."""
    rows = []
    for title, path in zip(("kvpolicy", "transformers"), paths):
        context, entries = read(path)
        cases = fastest(entries)
        for case in (name for name in cases if "rounded" in name):
            entry = cases[case]
            rows.append([f"{title}, activations rounded, too", case.rpartition("/")[2], f"{number(entry['weights_mb'])} MB",
                         f"{number(entry['ms'])} ms ({number(entry['min_ms'])} to {number(entry['p90_ms'])})", "", ""])
        for case in (name for name in cases if "prefill" in name):
            prefill, decode = cases[case], cases[case.replace("prefill", "decode")]
            many = cases.get(case.replace("prefill", "decode_8_texts"))
            rows.append([title, case.rpartition("/")[2], f"{number(prefill['weights_mb'])} MB"]
                        + [f"{number(entry['ms'])} ms ({number(entry['min_ms'])} to {number(entry['p90_ms'])})"
                           for entry in (prefill, decode)]
                        + [f"{number(many['ms'])} ms, alone {number(many['ms_one_by_one'])} ms: {many['speedup']:.2f} "
                           f"({many['speedup_p10']:.2f} to {many['speedup_p90']:.2f})" if many else ""])
    context, entries = read(paths[0])
    weights = {entry["name"].split("/")[2]: entry["read_weights_ms"] for entry in entries if "read_weights_ms" in entry}
    peer, _ = read(paths[1])
    for entry in read(paths[2])[1]:
        if entry["rows"] > 0 and entry["name"] == "original":
            rows.append(["llama2.c", "float32", "", "",
                         f"{number(entry['ms'])} ms ({number(entry['ms_p10'])} to {number(entry['ms_p90'])})", ""])
            break
    limit = " and ".join(f"{number(ms)} ms in {kind}" for kind, ms in weights.items())
    return (f"{context['model']} on {context['cpu']}, {context['num_cpus']} threads, {context['date'][:10]}; {peer['versions']}. "
            f"Reading all weights once, without computing anything, takes {limit}.\n\n"
            + table(["engine", "weights", "their size", f"reading {int(context['prompt']):,} tokens: median (fastest to 90th percentile)",
                     "a token after them", "a token of each of 8 texts: together, one after another, times as fast"], rows, left=3))


def batch(path):
    """A step of many sequences: one call beside one call for each."""
    context, entries = read(path)
    cases = fastest(entries)
    rows = []
    for name, entry in cases.items():
        _, plan, size, threads = name.split("/")
        if threads != f"threads:{context['cores']}":
            continue
        sequences, tokens = size.split("x")
        rows.append([f"`{plan}`", sequences, f"{int(tokens):,}", f"{number(entry['ms'])} ms", f"{number(entry['ms_one_by_one'])} ms",
                     f"{entry['speedup']:.2f} ({entry['speedup_p10']:.2f} to {entry['speedup_p90']:.2f})",
                     f"{number(entry['percent_of_ceiling'])} %"])
    return (f"One layer of Llama-3-8B's shape on {context['cpu']}, {context['cores']} threads, {context['date'][:10]}.\n\n"
            + table(["plans", "sequences", "tokens of each", "one call", "one call each", "times as fast: median (10th to 90th percentile)",
                     "of the memory's best rate"], rows, left=1))


def bounded(*paths):
    """Attention with a bound beside reads of all rows."""
    if not paths:
        return "Not yet measured: `./scripts/bench-model --model models/smollm2 --bounded texts/novels.txt --out`."
    context, entries = read(paths[0])
    cases = fastest(entries)
    full = cases["full"]
    rows = [[f"`{name}`", f"{100 * entry['rows']:.0f} %", f"{number(entry['mb'])} MB", f"{100 * entry['unread']:.1f} %",
             f"{number(entry['ms'])} ms ({number(entry['min_ms'])} to {number(entry['p90_ms'])})", f"{full['ms'] / entry['ms']:.2f}"]
            for name, entry in cases.items()]
    return (f"A layer of {context['model']} on {context['cpu']}, {context['num_cpus']} threads, {int(context['rows']):,} rows that repeat those of a text of "
            f"{int(context['tokens']):,} tokens, mean of 7 layers, the unread share the largest of them, {context['date'][:10]}.\n\n"
            + table(["case", "rows read in full", "bytes read", "left unread (largest of all; without \"sure\" an estimate)", "time: median (fastest to 90th percentile)", "times as fast as `full`"], rows, left=1))


CPU_FILES = [file for _, file in CPU_RUNS]
TABLES = {"cpu_speed": ([INTEL, INTEL_TORCH], cpu_speed), "cuda_goals": (gpu_tables.GOAL_FILES, gpu_tables.cuda_goals),
          "gpu_state": (gpu_tables.PARTS, gpu_tables.gpu_state), "gpu_kit": (["gpu_kit.json*"], gpu_tables.gpu_kit),
          "cpu_machines": (CPU_FILES, cpu_machines),
          "cpu_goals": (CPU_FILES, cpu_goals), "cpu_torch": ([INTEL, INTEL_TORCH], cpu_torch),
          "cpu_ggml": ([INTEL, INTEL_GGML], cpu_ggml),
          "model": ([f"model_smollm2_{who}.json" for who in ("ours", "transformers", "llama2c")], model),
          "bounded": (["bounded_smollm2.json*"], bounded),
          "batch": (["batch_amd_epyc_2core.json"], batch)}
