# SPDX-License-Identifier: Apache-2.0
"""The tables of docs/serving.md: what the server carries at one memory budget, from serving_bench. Each table has a part
for every file bench/results/serving_*.json."""
from results_cpu import number, read

from .markdown import table

MIB = 1 << 20


def said_of(context):
    """Where, what and how."""
    traffic = context["traffic"]
    systems = ", ".join(f"{tokens:,}" for tokens in traffic["systems"])
    shared = f"Shared texts of {systems} tokens, own" if systems else "Nothing is shared: own"
    own, answer = traffic["own"], traffic["answer"]
    return (f"{context['model']} ({context['layers']} layers, {context['kv_heads']} KV heads of {context['head_dim']} channels) on "
            f"{context['cpu']}, {context['threads']} threads, {context['date'][:10]}; {number(context['memory_bytes'] / MIB)} MiB for KV "
            f"caches. {shared} texts of {own['least']} to {own['most']:,} (median {number(own['median'])}), "
            f"answers of {answer['least']} to {answer['most']:,} (median {number(answer['median'])}), seed {traffic['seed']}: "
            f"`{context['command']}`.")


def of_kind(entries, kind):
    return [(entry["name"].split("/"), entry) for entry in entries if entry["name"].split("/")[0] == kind]


def parts(paths, kind, make):
    """`make` of every file that has entries of this kind; none yet is said."""
    made = []
    for path in paths:
        context, entries = read(path)
        own = of_kind(entries, kind)
        if own:
            made.append(make(context, own, entries))
    return "\n\n".join(made) or "Not yet measured."


def percent(share):
    return f"{100 * share:.1f} %"


def right(entry):
    return f"{entry['right']} of {entry['asked']}" if entry.get("asked") else ""


def mib(count):
    return f"{number(count / MIB)} MiB" if count else "0"


def alike(entries, plan):
    """How many texts were the same alone and together."""
    for _, entry in of_kind(entries, "verify"):
        if entry["name"] == f"verify/{plan}":
            return f"{entry['equal']} of {entry['texts']}"
    return ""


def queued_at_once(paths, kind, said):
    """Everything queued at once; `said` of the context and an entry: what was queued."""
    def make(context, own, entries):
        full = next((entry for words, entry in own if words[1] == "full"), None)

        def times(entry, key):
            return f" ({number(entry[key] / full[key])}x)" if full and entry is not full else ""

        rows = [[f"`{words[1]}`", f"{entry['sequences_at_once']}{times(entry, 'sequences_at_once')}", number(entry["mean_sequences_at_once"]),
                 number(entry["requests_per_second"]),
                 f"{number(entry['tokens_per_second'])}{times(entry, 'tokens_per_second')}", percent(entry["found_share"]),
                 str(entry["moved_out"]), mib(entry["peak_bytes"]), right(entry), alike(entries, words[1])]
                for words, entry in own]
        titles = ["plan", "sequences at once, at most", "on average", "requests a second", "tokens a second", "of prompts found as prefixes",
                  "moved out", "most memory", "right answers", "texts as alone"]
        return f"{said(context, own[0][1])} {own[0][1]['requests']} requests queued at once.\n\n" + table(titles, rows)
    return parts(paths, kind, make)


def serving_saturated(*paths):
    """Texts that begin alike."""
    return queued_at_once(paths, "saturate", lambda context, _: said_of(context))


def serving_unshared(*paths):
    """Long texts that share nothing."""
    return queued_at_once(paths, "unshared", lambda context, entry: said_of({**context, "traffic": entry["traffic"]}))


def serving_open(*paths):
    """Poisson arrivals."""
    def make(context, own, _):
        rows = [[f"`{words[1]}`", number(entry["rate"]), str(entry["requests"]), str(entry["refused"]), number(entry["requests_per_second"]),
                 number(entry["tokens_per_second"]), f"{number(entry['first_token_ms'])} ms", f"{number(entry['first_token_ms_p99'])} ms",
                 f"{number(entry['between_ms'])} ms", f"{number(entry['between_ms_p99'])} ms", percent(entry["found_share"]),
                 f"{entry['sequences_at_once']}", str(entry["moved_out"]), mib(entry["peak_bytes"]), right(entry)] for words, entry in own]
        titles = ["plan", "arrivals a second", "requests", "refused", "answered a second", "tokens a second", "first token: median", "99 %",
                  "between tokens: median", "99 %", "of prompts found", "at once", "moved out", "most memory", "right answers"]
        return f"{said_of(context)}\n\n" + table(titles, rows)
    return parts(paths, "open", make)


def serving_batch(*paths):
    """Eight equal texts."""
    def make(context, own, _):
        rows = [[f"`{words[1]}`", str(entry["texts"]), f"{entry['prompt']:,}", number(entry["tokens_per_second"]),
                 number(entry["tokens_per_second_one_by_one"]),
                 f"{entry['speedup']:.2f} ({entry['speedup_least']:.2f} to {entry['speedup_most']:.2f})"] for words, entry in own]
        return (f"{context['model']}, {context['layers']} layers, on {context['cpu']}, {context['threads']} threads.\n\n"
                + table(["plan", "texts", "tokens of each", "tokens a second, together", "one after another",
                         "times as many: median (least to most)"], rows))
    return parts(paths, "batch", make)


def serving_prefix(*paths):
    """One prefix for many requests."""
    def make(context, own, _):
        rows = [[f"`{words[1]}`", str(entry["requests"]), f"{entry['prefix_tokens']:,} + {entry['own_tokens']}",
                 f"{number(entry['seconds_cold'])} s", f"{number(entry['seconds'])} s", f"{number(entry['times_less'])}x",
                 f"{number(entry['seconds_all_at_once'])} s", mib(entry["prefix_bytes"]), mib(entry["live_bytes"]), mib(entry["tails_bytes"]),
                 f"{entry['prefixes_in_memory']:.2f}"] for words, entry in own]
        return (f"{context['model']}, {context['layers']} layers, on {context['cpu']}, {context['threads']} threads.\n\n"
                + table(["plan", "requests", "tokens: shared + own", "until all first tokens: nothing shared", "after a first request", "less",
                         "all at once", "the prefix", "in memory while all write", "of it the requests' own", "the rest, in prefixes"], rows))
    return parts(paths, "prefix", make)


def serving_hours(*paths):
    """Simulated hours; the first file that has them."""
    for path in paths:
        context, entries = read(path)
        for _, entry in of_kind(entries, "hours"):
            samples = entry["samples"]
            shown = [samples[round(i * (len(samples) - 1) / 4)] for i in range(5)] if len(samples) > 5 else samples
            rows = [[number(one["hour"]), f"{one['requests']:,}", mib(one["live_bytes"]), mib(one["prefix_bytes"]), mib(one["peak_bytes"]),
                     mib(one["resident_bytes"])] for one in shown]
            return (f"A tiny model under `{entry['plan']}`, {number(entry['rate'])} arrivals and "
                    f"{number(1 / entry['step_seconds'])} steps a simulated second, {mib(entry['budget_bytes'])}: {entry['requests']:,} requests in "
                    f"{number(entry['hours'])} simulated hours ({number(entry['seconds'])} s on {context['cpu']}), {entry['moved_out']:,} moved out. "
                    f"At the end the process has {number(entry['resident_growth'])} times the memory that it had after a quarter.\n\n"
                    + table(["after hours", "requests in the hour before", "idle: in use", "of it prefixes", "most so far", "the process"], rows))
    return "Not yet measured."


FILES = ["serving_*.json"]
TABLES = {"serving_saturated": (FILES, serving_saturated), "serving_unshared": (FILES, serving_unshared),
          "serving_open": (FILES, serving_open), "serving_batch": (FILES, serving_batch),
          "serving_prefix": (FILES, serving_prefix), "serving_hours": (FILES, serving_hours)}
