# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/distributed.md, from bench/shards: who waits for whom (imbalance.py), what heads cost (shards_bench
costs), what many ranks are predicted to take (shards_bench predict), what a few take here (measured.py), and what they send
each other for a prompt (shards_bench prompt)."""
import json

from .markdown import table

DIVISIONS = {"even": "equally many heads, in their order", "whole": "whole heads, divided by cost",
             "cut": "dear heads cut by rows, messages for nothing", "cut_with_messages": "the same, a part's message {message:g} µs"}
PLANS = {"full": "full", "duo": "duo", "duo+int4": "duo + int4"}
WORDS = {"equal heads": "equally many heads", "balanced": "balanced"}


def read(path):
    return json.loads(path.read_text(encoding="utf-8"))


def shards(path):
    results = read(path)
    cases = results["cases"]
    ranks = sorted({case["ranks"] for case in cases})
    rows = []
    for pattern in dict.fromkeys(case["pattern"] for case in cases):
        own = {case["ranks"]: case for case in cases if case["pattern"] == pattern}
        for division, words in DIVISIONS.items():
            name = f"{pattern}, {own[ranks[0]]['kv_heads']} KV heads" if division == "even" else ""
            rows.append([name, words.format(message=results["message_us"])]
                        + [f"{own[count]['over_mean'][division]:.2f}" for count in ranks])
    context = (f"`bench/shards/imbalance.py`: sparsity {results['sparsity']:g}, {results['context']:,} tokens, "
               f"{cases[0]['bandwidth'] / 1e9:,.0f} GB/s.")
    return context + "\n\n" + table(["pattern", "", *(f"{count} ranks" for count in ranks)], rows, left=2)


def layers(path):
    results = read(path)
    cases = results["layers"]
    ranks = sorted({case["ranks"] for case in cases})
    rows = []
    for plan in dict.fromkeys(case["plan"] for case in cases):
        own = {case["ranks"]: case for case in cases if case["plan"] == plan}
        rows.append([plan] + [f"{own[count]['worst_layer']:.3f}" for count in ranks] + [str(own[ranks[-1]]["cut_heads"])])
    worst = max(case["worst_layer"] for case in cases)
    return (f"`bench/shards/imbalance.py`: {results['context']:,} tokens, messages for nothing, heads with a budget may be cut; "
            f"the worst of all is {worst:.3f}.\n\n"
            + table(["plan", *(f"{count} ranks" for count in ranks), f"heads cut at {ranks[-1]}"], rows))


def costs(path):
    results = read(path)
    wanted = (320, 4096, 16384, 131072)
    rows = []
    for curve in results["curves"]:
        if curve["queries"] not in (1, 8, 16):
            continue
        bits = curve["setting"].get("storage", {}).get("bits")
        points = {point["rows"]: point for point in curve["measured"]}
        cells = [f"{1e6 * points[count]['seconds']:,.0f} ({1e6 * points[count]['p10']:,.0f} to {1e6 * points[count]['p90']:,.0f})"
                 for count in wanted]
        rows.append([f"{bits} bits" if bits else "bfloat16", str(curve["queries"]), *cells])
    machine = results["machine"]
    return (f"{machine['cpu']}, {machine['threads']} thread, {machine['samples']} samples of each, cold; µs of processor time, median "
            f"(10th to 90th percentile). The same thread reads {results['bandwidth'] / 1e9:.1f} GB/s from memory. Other "
            f"programs ran for {machine['others_percent']:.0f} % of the machine's time.\n\n"
            + table(["rows", "query heads", *(f"{count:,} rows" for count in wanted)], rows, left=2))


def in_nodes(cases, node=8):
    """Cases over nodes of so many ranks: fewer ranks than that are in one node either way."""
    return [case for case in cases if case["node"] == min(case["ranks"], node)]


def of_ranks(cases, cell, node=8, ranks=None):
    """Rows of a table: models, plans and divisions, with a cell for each number of ranks. `cell` gets the case that
    counts bytes and the one that counts times."""
    ranks = ranks or sorted({case["ranks"] for case in cases})
    rows = []
    for model in dict.fromkeys(case["model"] for case in cases):
        for plan, plan_words in PLANS.items():
            for division, words in WORDS.items():
                own = {(case["ranks"], case["rows_by"]): case for case in in_nodes(cases, node)
                       if (case["model"], case["plan"], case["division"]) == (model, plan, division)}
                rows.append([model if plan == "full" and division == "equal heads" else "", plan_words, words]
                            + [cell(own[count, "bytes"], own[count, "times"]) for count in ranks])
    return table(["model", "plan", "heads", *(f"{count}" for count in ranks)], rows, left=3)


def span(least, most, unit):
    """"12 to 15", or "12" where they round to the same."""
    low, high = sorted((unit * least, unit * most))
    digits = 0 if high >= 99.5 else 1
    low, high = f"{low:,.{digits}f}", f"{high:,.{digits}f}"
    return low if low == high else f"{low} to {high}"


def milliseconds(load):
    return lambda by_bytes, by_times: span(by_bytes[load]["seconds"], by_times[load]["seconds"], 1e3)


def said(context, what):
    return (f"**Predicted** (`shards_bench predict`): {what}; {context['tokens']:,} tokens a text, pattern "
            f"{context['pattern']} at sparsity {context['sparsity']:g}, {context['device']}.")


def users(path):
    results = read(path)
    context = results["context"]

    def cell(by_bytes, by_times):
        if by_bytes["users"] is None:
            return "-"
        return span(by_bytes["users"], by_times["users"], 1).replace(".0", "")

    what = f"texts that fit into {context['device_memory'] / 1e9:g} GB a rank beside the weights, by ranks; -: the weights do not"
    return said(context, what) + "\n\n" + of_ranks(results["cases"], cell)


def strong(path):
    results = read(path)
    context = results["context"]
    far = [count for count in sorted({case["ranks"] for case in results["cases"]}) if count > 8]
    what = f"ms of a step of {context['strong_texts']} texts, by ranks, whether or not they fit; strong scaling"
    return (said(context, what) + "\n\n" + of_ranks(results["cases"], milliseconds("strong"))
            + "\n\nThe same with NVLink between all ranks:\n\n"
            + of_ranks(results["cases"], milliseconds("strong"), node=64, ranks=far))


def weak(path):
    results = read(path)
    return (said(results["context"], "ms of a step with a text for each rank, by ranks; weak scaling") + "\n\n"
            + of_ranks(results["cases"], milliseconds("weak")))


def parts(path):
    results = read(path)
    context = results["context"]
    rows = []
    for model in dict.fromkeys(case["model"] for case in results["cases"]):
        for ranks in sorted({case["ranks"] for case in results["cases"]}):
            case, = [case for case in in_nodes(results["cases"]) if (case["model"], case["ranks"]) == (model, ranks)
                     and (case["plan"], case["division"], case["rows_by"]) == ("duo", "balanced", "bytes")]
            load = case["strong"]
            rows.append([model, str(ranks), *(f"{1e3 * load[f'{name}_seconds']:.1f}" for name in ("weights", "rows", "messages")),
                         str(load["cut_heads"])])
    return (said(context, f"where a step of {context['strong_texts']} texts goes under duo, balanced, if rows take their bytes; ms")
            + "\n\n" + table(["model", "ranks", "weights", "rows", "messages", "heads cut"], rows, left=1))


def measured(path):
    results = read(path)
    context = results["context"]
    rows = []
    for case in results["cases"]:
        prediction = case["predicted"]["parts"] + case["predicted"]["messages"]
        found = case["measured"]
        rows.append([str(case["ranks"]), PLANS[case["plan"]], WORDS[case["division"]],
                     *(f"{1e3 * number:.2f}" for number in (case["predicted"]["parts"], case["predicted"]["messages"], prediction)),
                     f"{1e3 * found['median']:.2f} ({1e3 * found['p10']:.2f} to {1e3 * found['p90']:.2f})"])
    messages = "; ".join(f"at {one['ranks']} ranks a sum takes {1e6 * one['sum']['median']:.0f} µs "
                         f"({1e6 * one['sum']['p10']:.0f} to {1e6 * one['sum']['p90']:.0f}) and a gather {1e6 * one['gather']['median']:.0f} µs"
                         for one in results["messages"])
    return (f"**Measured** (`bench/shards/measured.py`) on {context['cpu']}, {context['cores']} cores, {context['tokens']:,} tokens, "
            f"{context['steps']} steps, ms, median (10th to 90th percentile); {messages}. Other programs ran for up to "
            f"{context['most_others_percent']:.0f} % of the machine's time.\n\n"
            + table(["ranks", "plan", "heads", "parts alone", "messages", "together, predicted", "measured"], rows, left=3))


def prompt(path):
    results = read(path)
    context = results["context"]

    def megabytes(number):
        return f"{number / 1e6:,.0f}" if number >= 10e6 else f"{number / 1e6:,.2f}"
    rows = [[str(case["ranks"]), *(megabytes(case[head]) for head in ("full_head", "window_head")),
             *(megabytes(case[plan][what]) for plan in ("full", "half") for what in ("read", "all"))] for case in results["cases"]]
    return (f"**Counted** (`shards_bench prompt`): MB that a rank sends for a layer, mean over ranks and layers; {context['model']}, "
            f"{context['tokens']:,} tokens of bfloat16, windows of {context['sinks']} sinks and {context['recent']} recent rows.\n\n"
            + table(["ranks", "a full head, to be read", "a window, to be read", "8 full heads, to be read", "and to be held",
                     "4 full heads and 4 windows, to be read", "and to be held"], rows, left=0))


PREDICTED = ["shards_predicted.json"]
TABLES = {"shards": (["shards.json"], shards), "shards_layers": (["shards.json"], layers),
          "shards_costs": (["costs_intel_xeon_processor_2core.json"], costs), "shards_users": (PREDICTED, users),
          "shards_strong": (PREDICTED, strong), "shards_weak": (PREDICTED, weak), "shards_parts": (PREDICTED, parts),
          "shards_measured": (["shards_measured.json"], measured), "shards_prompt": (["shards_prompt.json"], prompt)}
