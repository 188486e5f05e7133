#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Asks the questions that `evaluate --write-tasks` has written of other people's KV caches, in their own code, on a CPU:
presses of kvpress and the caches of transformers. bench/peers/make_venv makes the environment that it needs.

  ask.py --model models/smollm2 --tasks tasks.jsonl --method full snapkv adakv --ratio 2 4 --out theirs.json
  ask.py ... --out theirs.json --resume       measures only what theirs.json lacks

Tokens are those of the file, so no tokenizer is asked; it only spells the answers. Decoding is greedy and ends as
evaluate's does: when all answers are found, at an end of the text, or after `max_tokens`. With --compress text a press drops
rows before it has seen a question, as kvpress is meant; with --compress question text and question are read
as one prompt, and the press drops rows of both.
"""
import argparse
import copy
import shlex
import statistics
import sys
import time

import questions as q
from held_bytes import held_bytes


def arguments_of(names):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, metavar="DIR", help="Hugging Face folder of the model")
    parser.add_argument("--tasks", required=True, metavar="FILE", help="what evaluate --write-tasks has written")
    parser.add_argument("--method", nargs="+", default=["full"], choices=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--ratio", nargs="+", type=int, default=[2, 4, 8, 16, 32], metavar="X",
                        help="one row in X is kept; full and quantised caches take none")
    parser.add_argument("--compress", choices=("text", "question"), default="text", help="when rows are dropped, see above")
    parser.add_argument("--dtype", choices=("bfloat16", "float32"), default="bfloat16")
    parser.add_argument("--duo-pattern", metavar="FOLDER", help="the pattern of --method duo, as DuoAttention publishes it")
    parser.add_argument("--out", required=True, metavar="FILE", help="results, written after each point")
    parser.add_argument("--resume", action="store_true", help="skip what --out has already")
    return parser.parse_args()


class Asker:
    """One model that is asked under one method after another."""

    def __init__(self, folder, dtype):
        import torch
        import transformers

        import methods

        self.torch, self.methods = torch, methods
        self.model = methods.load_model(folder, dtype)
        self.tokenizer = transformers.AutoTokenizer.from_pretrained(folder, local_files_only=True)

    def read(self, tokens, cache, at):
        """The logits after the last of `tokens`, which stand in the text from position `at` on."""
        if len(tokens) > 1 and not self.methods.is_even(cache):
            # transformers makes one mask for all layers, with the rows of the first one; a single token needs none.
            for i in range(len(tokens) - 1):
                self.read(tokens[i:i + 1], cache, at + i)
            return self.read(tokens[-1:], cache, at + len(tokens) - 1)
        positions = self.torch.arange(at, at + len(tokens)).unsqueeze(0)
        said = self.model(input_ids=self.torch.tensor([tokens]), past_key_values=cache, position_ids=positions,
                          logits_to_keep=1)
        return said.logits[0, -1].float()

    def read_prompt(self, method, tokens):
        cache = method.new_cache(self.model)
        first = len(tokens) - len(tokens) % method.row_step
        with method.reading(self.model, len(tokens)):
            logits = self.read(tokens[:first], cache, 0)
        return cache, self.read(tokens[first:], cache, first) if first < len(tokens) else logits

    def write(self, question, ends, cache, logits, at):
        """(share of the answers found, tokens written)"""
        said, found = [], 0.0
        while found < 1 and len(said) < question["max_tokens"]:
            if said:
                logits = self.read(said[-1:], cache, at + len(said) - 1)
            said.append(int(logits.argmax()))
            if said[-1] in ends:
                break
            found = q.score(question, self.tokenizer.decode(said))
        return found, said

    def choose(self, question, cache, logits, at):
        sums = []
        for choice in question["choices"]:
            own, after, nats = copy.deepcopy(cache), logits, 0.0
            for i, token in enumerate(choice["tokens"]):
                if i > 0:
                    after = self.read(choice["tokens"][i - 1:i], own, at + i - 1)
                nats += float(after.log_softmax(-1)[token])
            sums.append(nats)
        return q.best_choice(question, sums), []

    def ask(self, method, task, compress):
        """A result for each question of a task."""
        body = task["body"]["tokens"]
        read = self.read_prompt(method, body)[0] if compress == "text" and method.copies else None
        for question in task["questions"]:
            at = len(body) + len(question["tokens"])
            if compress == "text":
                cache = self.read_prompt(method, body)[0] if read is None else copy.deepcopy(read)
                logits = self.read(question["tokens"], cache, len(body))
            else:
                cache, logits = self.read_prompt(method, body + question["tokens"])
            held = held_bytes(cache, self.methods.masks_of(self.model))
            rows = self.methods.row_bytes(self.model, cache, held)
            found, said = (self.choose(question, cache, logits, at) if question["choices"]
                           else self.write(question, task["ends"], cache, logits, at))
            yield {"found": found, "said": said, "kv_bytes": held, "row_bytes": rows}

    def point(self, method, tasks, compress, report):
        results, per_text = [], []
        with self.torch.inference_mode():
            for task in tasks:
                before = len(results)
                for result in self.ask(method, task, compress):
                    results.append(result)
                    report(len(results))
                per_text.append(len(results) - before)
        return {"marks": "".join("1" if result["found"] == 1 else "0" for result in results),
                "found": [round(result["found"], 6) for result in results], "questions_per_text": per_text,
                "kv_bytes": statistics.mean(result["kv_bytes"] for result in results),
                "row_bytes": statistics.mean(result["row_bytes"] for result in results),
                "said": [result["said"] for result in results]}


def versions():
    from importlib.metadata import PackageNotFoundError, version

    found = {}
    for package in ("torch", "transformers", "kvpress", "optimum-quanto", "hqq"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            found[package] = None
    return found


def wanted_points(arguments, groups, has_ratio):
    """(key of the point without its plan's settings, tasks) in the order of the file."""
    for group, tasks in groups.items():
        for name in arguments.method:
            for ratio in arguments.ratio if has_ratio(name) else [1]:
                yield (*group, name, ratio, arguments.compress), tasks


def main():
    try:
        import methods
    except ModuleNotFoundError as missing:
        raise SystemExit(f"ask.py: Python's package {missing.name} is missing. bench/peers/make_venv installs what is needed; "
                         "then run this with build/peers-venv/bin/python") from missing

    arguments = arguments_of(methods.NAMES)
    groups = q.groups_of(q.load_tasks(arguments.tasks))
    settings = {"dtype": arguments.dtype, "versions": versions()}
    command = shlex.join(["bench/peers/ask.py", *(word for word in sys.argv[1:] if word != "--resume")])
    known = q.load_points(arguments.out, settings) if arguments.resume else {}
    missing = [point for point in wanted_points(arguments, groups, methods.has_ratio) if point[0] not in known]
    if not missing:
        print("there is nothing left to measure", file=sys.stderr)
        return
    asker = Asker(arguments.model, arguments.dtype)
    for number, (key, tasks) in enumerate(missing, 1):
        suite, tokens, seed, name, ratio, compress = key
        doing = f"[{number}/{len(missing)}] {suite} at {tokens:,}, seed {seed}: {name}" + (f" 1/{ratio}" if ratio > 1 else "")
        count = sum(len(task["questions"]) for task in tasks)
        began = time.monotonic()
        point = dict(zip(q.POINT_KEYS, key))
        try:
            method = methods.make_method(name, ratio, arguments.duo_pattern)
            found = asker.point(method, tasks, compress, lambda done, doing=doing, count=count: print(
                f"\r{doing}, question {done}/{count}", end="", file=sys.stderr, flush=True))
            point.update(settings=method.settings(), **found)
            print(f"\r{doing}: {found['marks'].count('1')} of {count} right, {time.monotonic() - began:.0f} s", file=sys.stderr)
        except (ValueError, AssertionError, RuntimeError, NotImplementedError, ImportError) as why:
            point["refused"] = f"{type(why).__name__}: {str(why).splitlines()[0] if str(why) else ''}"
            print(f"\r{doing}: {point['refused']}", file=sys.stderr)
        known[key] = point
        q.write_points(arguments.out, command, settings, list(known.values()))


if __name__ == "__main__":
    try:
        main()
    except (OSError, ValueError) as why:
        sys.exit(f"ask.py: {why}")
