# SPDX-License-Identifier: Apache-2.0
"""The table of docs/adoption.md: llama2.c as it is and edited, from examples/adopters/llama2.c/bench.py."""
from results_cpu import number, read

from .markdown import table


def megabytes(count):
    return f"{number(count / 1e6)} MB"


def where_it_comes_from(cases, last, threads):
    """What of the difference is the engine's, and what the plan's."""
    ms = {name: cases[f"{name}{threads}", last]["ms"] for name in ("original", "every row", "duo")}
    rest = {name: cases[f"{name}{threads}", 0]["ms"] for name in ms}
    # A time that is lost in noise is not divided by.
    loop = (ms["original"] - rest["original"]) / max(ms["every row"] - rest["every row"], 1e-3)
    return (f"On {threads.removeprefix(', ') or 'all threads'} the edited program makes {number(ms['original'] / ms['duo'])} "
            f"times as many tokens a second after {last:,} tokens with half of the heads streaming, and "
            f"{number(ms['original'] / ms['every row'])} times as many with every row kept. So much comes from attention "
            f"that reads each row once for all query heads of its KV head, and in half the bytes; it is {number(loop)} times "
            f"as fast as the engine's loop. The rest, {number(ms['every row'] / ms['duo'])} times, comes from rows that are "
            f"not kept. {number(rest['duo'])} ms of each token are the rest of the model, which stays as it was.")


def llama2c(*paths):
    """A table for each file; none yet is said."""
    made = []
    for path in paths:
        context, entries = read(path)
        cases = {(entry["name"], entry["rows"]): entry for entry in entries}
        lengths = sorted({rows for _, rows in cases} - {0})
        last = lengths[-1]
        rows = []
        for name in dict.fromkeys(name for name, _ in cases):
            plan, own = context["plans"].get(name), cases[name, last]
            rows.append([name, f"`{context['flags'][name]}`", f"`-k {plan}`" if plan else ""]
                        + [number(cases[name, length]["tokens_per_second"]) for length in lengths]
                        + [f"{number(own['ms'])} ms ({number(own['ms_p10'])} to {number(own['ms_p90'])})",
                           f"{number(own['ms'] - cases[name, 0]['ms'])} ms"]
                        + [megabytes(cases[name, length]["cache_bytes"]) for length in (lengths[0], last)])
        titles = (["program", "compiled with", "plan"] + [f"tokens a second after {length:,}" for length in lengths]
                  + [f"a token after {last:,} (10th to 90th percentile)", "of it attention",
                     f"rows in memory after {lengths[0]:,}", f"after {last:,}"])
        shape = context["shape"]
        made.append(
            f"{context['model']} ({shape['layers']} layers, {shape['q_heads']} query and {shape['kv_heads']} KV heads of "
            f"{shape['head_dim']} channels) on {context['cpu']}, {context['num_cpus']} cores, {context['compiler']}, "
            f"{context['date'][:10]}; {context['rounds']} x {context['tokens_a_run']} tokens each, all programs in turn; "
            f"{context['changed_lines']} lines changed; duo's heads: {context['pattern']}. The original allocates "
            f"{megabytes(shape['layers'] * shape['kv_heads'] * shape['head_dim'] * shape['seq_len'] * 8)} at its start.\n\n"
            + table(titles, rows, left=3) + "\n\n" + where_it_comes_from(cases, last, ", one thread") + "\n\n"
            + where_it_comes_from(cases, last, ""))
    return "\n\n".join(made) or "Not yet measured."


TABLES = {"llama2c": (["llama2c_*.json"], llama2c)}
