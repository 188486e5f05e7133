# SPDX-License-Identifier: Apache-2.0
"""The table of docs/adoption.md: llama2.c as it is and edited, from examples/adopters/llama2.c/bench.py."""
from results_cpu import number, read

from .markdown import table

ORIGINAL, SAME_ROWS, PLAN = "original -Ofast -fopenmp", "every row, bfloat16", "duo"


def megabytes(count):
    return f"{number(count / 1e6)} MB"


def llama2c(*paths):
    """A table for each file; none yet is said."""
    made = []
    for path in paths:
        context, entries = read(path)
        cases = {(entry["name"], entry["rows"]): entry for entry in entries}
        lengths = sorted({rows for _, rows in cases} - {0})
        last = lengths[-1]

        def attention(name):
            return cases[name, last]["ms"] - cases[name, 0]["ms"]

        rows = []
        for name in dict.fromkeys(name for name, _ in cases):
            plan = context["plans"].get(name)
            own = cases[name, last]
            rows.append([name if plan else f"{name.replace('original ', 'original, `')}`", f"`-k {plan}`" if plan else ""]
                        + [number(cases[name, length]["tokens_per_second"]) for length in lengths]
                        + [f"{number(own['ms'])} ms ({number(own['ms_p10'])} to {number(own['ms_p90'])})",
                           f"{number(attention(name))} ms"]
                        + [megabytes(cases[name, length]["cache_bytes"]) for length in (lengths[0], last)])
        titles = (["program", "plan"] + [f"tokens a second after {length:,}" for length in lengths]
                  + [f"a token after {last:,} (10th to 90th percentile)", "of it attention",
                     f"rows in memory after {lengths[0]:,}", f"after {last:,}"])
        faster = {name: cases[ORIGINAL, last]["ms"] / cases[name, last]["ms"] for name in (SAME_ROWS, PLAN)}
        less = attention(ORIGINAL) / attention(SAME_ROWS)
        shape = context["shape"]
        made.append(
            f"{context['model']} ({shape['layers']} layers, {shape['q_heads']} query and {shape['kv_heads']} KV heads of "
            f"{shape['head_dim']} channels) on {context['cpu']}, {context['num_cpus']} cores, {context['compiler']}, "
            f"{context['date'][:10]}; {context['rounds']} x {context['tokens_a_run']} tokens each, all programs in turn; "
            f"{context['changed_lines']} lines changed; duo's heads: {context['pattern']}.\n\n"
            + table(titles, rows, left=2) +
            f"\n\nAfter {last:,} tokens the edited program makes {number(faster[PLAN])} times as many tokens a second with "
            f"half of the heads streaming as the original compiled alike. With every row kept it makes "
            f"{number(faster[SAME_ROWS])} times as many: so much comes from attention that reads each row once for all query "
            f"heads of its KV head, and in half the bytes; it is {number(less)} times as fast as the engine's loop. The rest, {number(faster[PLAN] / faster[SAME_ROWS])} times, comes from rows that are not kept. "
            f"The other {number(cases[PLAN, 0]['ms'])} ms of a token are matrix products with weights in float, which stay "
            f"as they were.")
    return "\n\n".join(made) or "Not yet measured."


TABLES = {"llama2c": (["llama2c_*.json"], llama2c)}
