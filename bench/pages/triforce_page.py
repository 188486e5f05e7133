# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/triforce.md, from the measurements of ./scripts/bench-triforce."""
import json
import re
import sys

from .markdown import table

KINDS = {"prose": "goes on with a text", "needles": "answers questions about it"}
SHIPPED = re.compile(r"structure/(?P<structure>[^/]+)/(?P<kind>[^/]+)/t(?P<temperature>[\d.]+)")
SHAPES = re.compile(r"shapes/target:(?P<target>\d+)/middle:(?P<middle>\d+)/length:(?P<length>\d+)")


def load(path):
    try:
        with open(path, encoding="utf-8") as file:
            return json.load(file)
    except ValueError as why:
        sys.exit(f"{path} is not what a bench writes: {why}")


def machine(context):
    name = re.sub(r"\s+", " ", context.get("cpu", "an unknown processor"))
    return f"{name}, {context['num_cpus']} cores, {context['date'][:10]}"


def cases(results, pattern):
    """(fields of the name, counters) of each case that was measured."""
    for case in results["benchmarks"]:
        found = pattern.match(case["name"])
        if found and "speedup" in case:
            yield found.groupdict(), case


def times(case):
    """The time of a token, and the speedup: median, range, prediction."""
    return [f"{case['plain_ms']:.2f}", f"{case['ms']:.2f}",
            f"{case['speedup']:.2f} ({case['speedup_min']:.2f} to {case['speedup_max']:.2f})",
            f"{case['predicted']:.2f}"]


TIMES = ["plain, ms a token", "with guesses", "times as fast (range)", "predicted"]


def shipped(path):
    """The shipped model with every structure of drafts."""
    results = load(path)
    rows = []
    for name, case in cases(results, SHIPPED):
        middle = case.get("middle_acceptance")
        rows.append([f"`{name['structure']}`", KINDS[name["kind"]], name["temperature"],
                     f"{case['acceptance']:.3f}", "" if middle is None else f"{middle:.3f}",
                     f"{case['tokens_per_verification']:.2f}"] + times(case))
    titles = ["structure", "text", "temperature", "accepted", "of the small draft's", "tokens a pass"]
    text = int(results["context"]["text"])
    return (f"After {text:,} bytes; {machine(results['context'])}.\n\n" + table(titles + TIMES, rows))


def shapes(path):
    """A model of Llama-2-7B's proportions, whose draft tokens are accepted at random."""
    results = load(path)
    rows = []
    for name, case in cases(results, SHAPES):
        middle = int(name["middle"])
        rows.append([f"{int(name['target']) / 1000:.3f}",
                     f"{middle / 1000:.2f}" if middle else "no small draft", name["length"],
                     f"{case['tokens_per_verification']:.2f}"] + times(case))
    context = results["context"]
    titles = ["target accepts", "middle level accepts", "γ", "tokens a pass"]
    return (f"After {int(context['context']):,} rows, {int(context['budget']):,} of them selected; "
            f"{machine(context)}.\n\n" + table(titles + TIMES, rows))


MODEL_KINDS = {"continues": "goes on with a text", "repeats": "quotes the text"}
STRUCTURE = re.compile(r"structure/(?P<structure>[^/]+)/(?P<kind>[^/]+)/t(?P<temperature>[\d.]+)"
                       r"/(?P<text>[^/]+)/(?P<context>\d+)/iterations")
SELECTION = re.compile(r"(?P<what>budget|chunk)/(?P<kind>[^-/]+)-(?P<summary>bounds|means)"
                       r"/(?P<text>[^/]+)/(?P<context>\d+)/(?P<rows>\d+)/iterations")
TEXT = re.compile(r"/(?P<text>[a-z]+)/\d+/")
ATTENTION = re.compile(r"attention/(?P<summary>bounds|means)/(?P<text>[^/]+)/(?P<context>\d+)"
                       r"/(?P<budget>\d+)/iterations")


def named_cases(results, pattern):
    for case in results["benchmarks"]:
        found = pattern.match(case["name"])
        if found:
            yield found.groupdict(), case


def grouped(results, pattern, *fields):
    """{fields of the name: cases of all texts}, in the order of the file; numbers become numbers."""
    groups = {}
    for name, case in named_cases(results, pattern):
        key = tuple(int(name[field]) if name[field].isdigit() and field != "temperature" else name[field]
                    for field in fields)
        groups.setdefault(key, []).append(case)
    return groups


def mean(cases, counter):
    values = [case[counter] for case in cases if counter in case]
    return sum(values) / len(values) if values else None


def share(value, digits=2):
    return "" if value is None else f"{value:.{digits}f}"


def with_range(cases, counter, digits=2):
    """The mean over the texts, and the range over all their pieces where there are several."""
    value = mean(cases, counter)
    if value is None:
        return ""
    low = min(case[counter + "_min"] for case in cases if counter in case)
    high = max(case[counter + "_max"] for case in cases if counter in case)
    return f"{value:.{digits}f}" + ("" if low == high else f" ({low:.{digits}f} to {high:.{digits}f})")


def texts_of(cases):
    """The texts that a row was measured on: not all of them need be the same in a table."""
    return ", ".join(sorted({TEXT.search(case["name"])["text"] for case in cases}))


def with_low(cases, counter):
    """The mean, and what a tenth of the heads stay below."""
    value, low = mean(cases, counter), mean(cases, counter + "_low")
    return "" if value is None else f"{value:.3f} ({low:.3f})"


def model_heading(results):
    """Which model and machine the cases are of, and how many pieces of each text."""
    context = results["context"]
    pieces, threads = int(context["texts"]), int(context["threads"])
    return (f"{context['model']}; {pieces} piece{'s' if pieces != 1 else ''} of each text; "
            f"{threads} thread{'s' if threads != 1 else ''}; {machine(context)}.\n\n")


def model(path):
    """A pretrained model that drafts for itself."""
    results = load(path)
    groups = grouped(results, STRUCTURE, "kind", "temperature", "structure", "context")
    order = list(MODEL_KINDS)
    rows = []
    for (kind, temperature, structure, context), cases in sorted(
            groups.items(), key=lambda item: (item[0][1], order.index(item[0][0]))):
        rows.append([f"`{structure}`", MODEL_KINDS[kind], texts_of(cases), temperature, f"{context:,}",
                     with_range(cases, "acceptance"), share(mean(cases, "tokens_per_verification")),
                     with_range(cases, "speedup"), share(mean(cases, "predicted"))])
    titles = ["draft", "task", "texts", "temperature", "tokens before", "accepted (range)", "tokens a pass",
              "times as fast (range)", "predicted"]
    greedy = [case for key, cases in groups.items() if key[1] == "0" for case in cases]
    ties = round(sum(case.get("near_ties", 0) for case in greedy))
    runs = len(greedy) * int(results["context"]["texts"])
    note = f"\n\n{ties} of {runs} greedy runs went on with other tokens after a near tie." if ties else ""
    return model_heading(results) + table(titles, rows, left=3) + note


def selection(path):
    """Acceptance over the budget and over the size of chunks, with six guesses a pass."""
    results = load(path)
    groups = grouped(results, SELECTION, "what", "rows", "summary", "kind", "context")
    columns = sorted({key[2:] for key in groups}, key=lambda key: (key[0], key[1], key[2]))
    rows = []
    for what, size in dict.fromkeys(key[:2] for key in sorted(groups)):
        cells = []
        for column in columns:
            cases = groups.get((what, size) + column)
            cells.append("" if cases is None else
                         f"{mean(cases, 'acceptance'):.2f}, {mean(cases, 'tokens_per_verification'):.1f}")
        all_cases = [case for key, cases in groups.items() if key[:2] == (what, size) for case in cases]
        rows.append([f"{what} {size:,}", texts_of(all_cases)] + cells)
    short = {"bounds": "min/max keys", "means": "mean keys", "continues": "goes on", "repeats": "quotes"}
    titles = [f"{short[kind]}, {short[summary]}, {context:,}" for summary, kind, context in columns]
    return model_heading(results) + table(["rows", "texts"] + titles, rows, left=2)


def attention(path):
    """The share of the attention that few rows get."""
    results = load(path)
    rows = []
    groups = grouped(results, ATTENTION, "context", "budget", "summary")
    for context, budget in dict.fromkeys(key[:2] for key in sorted(groups)):
        bounds, means = (groups.get((context, budget, summary), []) for summary in ("bounds", "means"))
        both = bounds or means
        rows.append([texts_of(both), f"{context:,}", f"{budget:,}", f"{budget / context:.3f}"] +
                    [with_low(both, "best"), with_low(bounds, "chosen"), with_low(means, "chosen"),
                     with_low(both, "latest")])
    titles = ["texts", "tokens before", "rows", "of all", "the best rows", "chunks of 16 by min/max keys",
              "chunks of 8 by mean keys", "16 sinks and the latest"]
    return model_heading(results) + table(titles, rows)


def choices_over_time(path):
    """What a choice of chunks is worth to the queries after the one that made it."""
    results = load(path)
    lags = sorted({int(key.split("_")[1]) for _, case in named_cases(results, ATTENTION) for key in case
                   if key.startswith("overlap_")})
    rows = []
    for (context, budget), cases in sorted(grouped(results, ATTENTION, "context", "budget").items()):
        cases = [case for case in cases if "/bounds/" in case["name"]]
        if not cases:
            continue
        for what, counter in (("same rows", "overlap"), ("attention", "fixed")):
            rows.append([texts_of(cases), f"{context:,}", f"{budget:,}", what, share(mean(cases, "chosen"), 3) if counter == "fixed"
                         else "1.000"] + [share(mean(cases, f"{counter}_{lag}"), 3) for lag in lags])
    titles = ["texts", "tokens before", "rows", "share of", "own choice"] + [f"{lag} later" for lag in lags]
    return model_heading(results) + table(titles, rows)


TABLES = {"triforce_model": (["triforce_model.json"], model),
          "triforce_model_selection": (["triforce_model.json"], selection),
          "triforce_model_attention": (["triforce_model.json"], attention),
          "triforce_model_choices": (["triforce_model.json"], choices_over_time),
          "triforce_shipped": (["triforce_shipped.json"], shipped),
          "triforce_shapes": (["triforce_shapes.json"], shapes)}
