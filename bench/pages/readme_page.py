# SPDX-License-Identifier: Apache-2.0
"""The numbers of README.md: its opening sentences, and the demo's table."""
import json

import results
from results_cpu import load_repetitions, number

from .markdown import table
from .performance_page import INTEL


def megabytes(count):
    return f"{count / 1e6:.2f} MB"


def demo_run(path):
    """Reads the output of `compare --json`."""
    with open(path, encoding="utf-8") as file:
        return json.load(file)


def real_gains(path):
    """What two plans keep of a pretrained model's answers, and in which bytes."""
    points = results.read(path)["points"]
    full = results.of(points, plan="full")

    def answered(own):
        found = [mark == "1" for point in own for mark in point["marks"]]
        return f"{sum(found)} of {len(found)} questions"

    def kept(plan):
        own = results.of(points, plan=plan)
        return f"{answered(own)} in {100 * results.bytes_share(own, full):.0f} % of the bytes"

    return (f"On SmolLM2, a pretrained model of 135 million parameters, half of the heads streaming answers "
            f"{kept('duo:0.5')} after {full[0]['tokens']:,} tokens, and all rows at 4 bits {kept('int4:32')}; "
            f"the full cache answers {answered(full)}.")


def unasked_gains(path):
    """What is left of a pretrained model's answers where rows were dropped before any question was known."""
    points = results.read(path)["points"]

    def share(own):
        found = [mark == "1" for point in own for mark in point["marks"]]
        return f"{100 * sum(found) / len(found):.0f} %"

    kvzip = results.of(points, method="kvzip", share=1 / 8)
    return (f"Where its prompt is compressed once, to an eighth of the rows and before any question is known, it answers {share(kvzip)} of "
            f"the questions, and {share(results.of(points, plan='full'))} with all rows ([KVzip](docs/results.md#before-any-question-is-known)).")


def gains(demo_path, speed_path, real_path, unasked_path):
    """Memory and answers by the demo and by a pretrained model's questions, time by the CPU bench."""
    plans = {row["plan"]: row for row in demo_run(demo_path)["plans"]}
    _, (cases,) = load_repetitions(speed_path)
    full, small = plans["full"], plans["duo+int4"]

    def ms(kind):
        return f"{number(cases[f'decode/{kind}/32x8/64Ki/threads:2']['ms'])} ms"

    return (f"On the small model that ships with the repository, half of the KV heads keep every row at 4 bits and the other half keep "
            f"sinks and a window: the cache is {small['times_smaller']:.1f} times smaller ({megabytes(full['kv_bytes'])} become "
            f"{megabytes(small['kv_bytes'])}), and the model answers {small['right']} of {small['questions']} questions about "
            f"the text, where it answers {full['right']} with the full cache. {real_gains(real_path)} {unasked_gains(unasked_path)} On one layer of Llama-3-8B's shape with 65,536 "
            f"cached tokens, a decode step on two CPU cores takes {ms('bf16')} over all rows, {ms('duo')} if half of the heads "
            f"stream, and {ms('retrieval')} if each head selects 4,096 rows.")


def demo(path):
    """A row for each plan."""
    run = demo_run(path)
    rows = [[f"`{row['plan']}`", row["about"], megabytes(row["kv_bytes"]), f"{row['times_smaller']:.1f}x",
             megabytes(row["kv_bytes_read_per_token"]), f"{row['prefill_ms']:,.0f}", f"{row['decode_ms_per_token']:.2f}",
             f"{row['right']} of {row['questions']}", f"{100 * row['agreement_with_full']:.1f} %"]
            for row in run["plans"]]
    where = f"{run['threads']} threads of {run['cpu']}, {run['date'][:10]}:\n\n" if "cpu" in run else ""
    return where + table(["plan", "what it keeps", "KV cache", "smaller", "read per token", "prefill ms", "decode ms/token",
                          "answers right", "same tokens as full"], rows, left=2)


TABLES = {"gains": (["demo.json", INTEL, "smollm2/storage_answers.json", "smollm2/unasked.json"], gains), "demo": (["demo.json"], demo)}
