#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Edits a copy of llama2.c's run.c so that it keeps its KV cache in kvpolicy, through the C interface.

  adopt.py RUN_C            edits the file in place
  adopt.py RUN_C --out FILE writes the edited program to FILE and leaves RUN_C alone

The edited program has the engine's own cache and loop as before, and these options besides:

  -k PLAN   which rows of which KV head are kept: full, int8, int4, sink_recent:16,128, duo@PATTERN:0.5,
            duo+int4@PATTERN:0.5, or a plan file PLAN.json (kvpolicy/c.h, kvp_plan_from_name)
  -b BITS   numbers of exact rows: 16 (bfloat16, the default) or 32 (float)
  -c FILE   the prompt's cache: read if the file is there, written otherwise; one prompt, one plan
  -r THETA  the base of RoPE, 10000 if not given

It is C, as before. A shared library of kvpolicy brings what it needs; with a static one, Highway and the C++ and
OpenMP runtimes are named, too:

  gcc -Ofast -march=native -fopenmp -I KVPOLICY/include run.c libkvpolicy_compiled.so -lm -o run
  gcc -Ofast -march=native -fopenmp -I KVPOLICY/include run.c libkvpolicy_compiled.a -lhwy -lstdc++ -lm -o run

An edit is an anchor (a piece of text that one line of the named part of the program has) and lines of ours, which
go before or after the anchor's line, or replace a piece of that line. If one anchor is not found exactly once, the
file is of another version of the engine: the anchor is named and nothing is written. Nor is an edited file edited
twice. The lines that were added and removed are counted and printed, a replaced line as both.
"""
import argparse
import difflib
import os
import sys
from pathlib import Path

# What the program had to declare before it could use the cache.
STATE = """
char *kv_name, *kv_file; // kvpolicy: the plan's name (NULL: the engine's own cache), the prompt's saved cache
kvp_dtype kv_dtype = KVP_BFLOAT16; // the numbers of exact rows
float rope_theta = 10000.0f;

void kv_check(kvp_status status) {
    if (status == KVP_OK) { return; }
    fprintf(stderr, "%s: %s\\n", kvp_status_name(status), kvp_error());
    exit(EXIT_FAILURE);
}

kvp_cache* kv_new(Config* p) {
    kvp_shape shape = {p->n_layers, p->n_heads, p->n_kv_heads, p->dim / p->n_heads};
    kvp_plan* plan; kvp_cache* cache;
    kv_check(kvp_plan_from_name(kv_name, &shape, kv_dtype, &plan));
    kv_check(kvp_cache_new(plan, NULL, &cache));
    kvp_plan_free(plan);
    return cache;
}
"""

# One token of one layer. The loop that is there already becomes the other branch.
STEP = """
        kvp_tensor q = {s->q, KVP_FLOAT32, 1, p->n_heads, head_size}, out = {s->xb, KVP_FLOAT32, 1, p->n_heads, head_size};
        kvp_tensor k = {s->k, KVP_FLOAT32, 1, p->n_kv_heads, head_size}, v = {s->v, KVP_FLOAT32, 1, p->n_kv_heads, head_size};
        if (s->kv) { kv_check(kvp_cache_step(s->kv, l, &q, &k, &v, &out, NULL)); } else
"""

# The file holds all tokens of the prompt but the last, whose logits are the first that are used.
LOAD = """
    kvp_cache* kv = transformer->state.kv;
    int saved = kv_file && access(kv_file, R_OK) == 0;
    if (saved) { kv_check(kvp_cache_load(kv, kv_file, prompt)); token = prompt_tokens[pos = num_prompt_tokens - 1]; }
    int first = pos;
"""
SAVE = """
        if (kv_file && !saved && pos == num_prompt_tokens - 1) { kv_check(kvp_cache_save(kv, kv_file, prompt)); }
"""
COMPRESS = """
        if (kv && pos == num_prompt_tokens - 1) { kv_check(kvp_cache_compress(kv)); } // heads with a budget
"""
REPORT = """
    kvp_cache_info info = {sizeof info};
    if (kv) { kv_check(kvp_cache_get_info(kv, &info)); fprintf(stderr, "KV cache: %zu bytes, %zu tokens\\n", info.bytes, info.tokens); }
"""
USAGE = """
    fprintf(stderr, "  -k <string> kvpolicy plan, e.g. full, int8, int4, duo@folder:0.5, plan.json\\n");
    fprintf(stderr, "  -b <int>    with -k: bits of a number in exact rows, 16 or 32, default 16\\n");
    fprintf(stderr, "  -c <string> with -k: file of the prompt's cache, read if it exists, else written\\n");
    fprintf(stderr, "  -r <float>  base of RoPE, default 10000\\n");
"""
ARGUMENTS = """
        else if (argv[i][1] == 'k') { kv_name = argv[i + 1]; }
        else if (argv[i][1] == 'b') { kv_dtype = atoi(argv[i + 1]) == 32 ? KVP_FLOAT32 : atoi(argv[i + 1]) == 16 ? KVP_BFLOAT16 : -1; }
        else if (argv[i][1] == 'c') { kv_file = argv[i + 1]; }
        else if (argv[i][1] == 'r') { rope_theta = atof(argv[i + 1]); }
"""

# (the part of the program, the anchor, before | after | a piece of its line, our text). A part begins with the line
# that has its text and ends with the next line that begins with a brace; "" is the whole file.
EDITS = [
    ("", "#include <fcntl.h>", "after", "#include <kvpolicy/c.h>"),
    ("", "float* value_cache;", "after", "    kvp_cache* kv; // a policy for every KV head; NULL: the two buffers above"),
    ("", "void malloc_run_state(", "before", STATE),
    ("void malloc_run_state(", "s->key_cache = calloc(", "before", "    s->kv = kv_name ? kv_new(p) : NULL;"),
    ("void malloc_run_state(", "s->key_cache = calloc(", "p->n_layers * p->seq_len",
     "(s->kv ? 1 : p->n_layers * p->seq_len)"),
    ("void malloc_run_state(", "s->value_cache = calloc(", "p->n_layers * p->seq_len",
     "(s->kv ? 1 : p->n_layers * p->seq_len)"),
    ("void free_run_state(", "free(s->value_cache);", "after", "    kvp_cache_free(s->kv);"),
    ("float* forward(", "s->k = s->key_cache", "loff + pos * kv_dim", "(s->kv ? 0 : loff + pos * kv_dim)"),
    ("float* forward(", "s->v = s->value_cache", "loff + pos * kv_dim", "(s->kv ? 0 : loff + pos * kv_dim)"),
    ("float* forward(", "powf(10000.0f,", "10000.0f", "rope_theta"),
    ("float* forward(", "#pragma omp parallel for", "before", STEP),
    ("void generate(", "int pos = 0;", "after", LOAD),
    ("void generate(", "forward(transformer, token, pos)", "before", SAVE),
    ("void generate(", "forward(transformer, token, pos)", "after", COMPRESS),
    ("void generate(", "// report achieved tok/s", "before", REPORT),
    ("void generate(", "if (pos > 1)", "pos > 1", "pos - first > 1"),
    ("void generate(", '"achieved tok/s', "(pos-1)", "(pos-first-1)"),
    ("void error_usage(", "(optional) system prompt", "after", USAGE),
    ("int main(", "== 'y')", "after", ARGUMENTS),
]


class Refused(Exception):
    pass


def only(lines, text, what):
    """The number of the one line among (number, line) that has `text`."""
    found = [number for number, line in lines if text in line]
    if len(found) != 1:
        raise Refused(f"{what} must have \"{text}\" in one line, has it in {len(found)}")
    return found[0]


def part_of(lines, name):
    if not name:
        return list(enumerate(lines))
    first = only(list(enumerate(lines)), name, "the program")
    last = next((number for number in range(first, len(lines)) if lines[number].startswith("}")), len(lines))
    return list(enumerate(lines))[first:last]


def edited(lines):
    """The program's lines after all edits. Every anchor is looked up in the program as it is given."""
    if any("kvpolicy" in line for line in lines):
        raise Refused("it names kvpolicy already: it is edited, and a file is edited once")
    before, after, changed = {}, {}, {}
    for part, anchor, how, text in EDITS:
        number = only(part_of(lines, part), anchor, f"the part \"{part}\"" if part else "the program")
        own = text.strip("\n").split("\n")
        if how == "before":
            before.setdefault(number, []).extend(own)
        elif how == "after":
            after.setdefault(number, []).extend(own)
        elif lines[number].count(how) != 1:
            raise Refused(f"the line with \"{anchor}\" must have \"{how}\" once, has it {lines[number].count(how)} times")
        else:
            changed[number] = lines[number].replace(how, text)
    return [made for number, line in enumerate(lines)
            for made in before.get(number, []) + [changed.get(number, line)] + after.get(number, [])]


def count_changes(before, after):
    lines = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    return sum(line[0] == "+" for line in lines), sum(line[0] == "-" for line in lines)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run_c", type=Path, help="a copy of llama2.c's run.c")
    parser.add_argument("--out", type=Path, help="write there instead of over it")
    arguments = parser.parse_args()
    try:
        lines = arguments.run_c.read_text(encoding="utf-8").split("\n")
        made = edited(lines)
    except (OSError, UnicodeDecodeError, Refused) as why:
        sys.exit(f"{arguments.run_c}: not edited: {why}")
    added, removed = count_changes(lines, made)
    out = arguments.out or arguments.run_c
    unfinished = out.with_name(out.name + ".unfinished")
    unfinished.write_text("\n".join(made), encoding="utf-8")
    os.replace(unfinished, out)
    print(f"{out}: {added + removed} lines changed ({added} added, {removed} removed)")


if __name__ == "__main__":
    main()
