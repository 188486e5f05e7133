#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests the parts of bench/peers that need no PyTorch: reading tasks, scoring, files of results, counting bytes, the table."""
import json
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "bench" / "peers"))
import held_bytes  # noqa: E402
import questions as q  # noqa: E402
import table  # noqa: E402

QUESTION = {"text": "?", "tokens": [3], "answers": ["7"], "rule": "contains", "max_tokens": 4, "choices": [], "depth": 0.5}
TASK = {"suite": "niah_depths", "tokens": 64, "seed": 1, "number": 0, "ends": [2], "body": {"text": "a", "tokens": [1]},
        "questions": [QUESTION]}


class Memory:
    def __init__(self, address, size):
        self.address, self.size = address, size

    def data_ptr(self):
        return self.address

    def nbytes(self):
        return self.size


class Tensor:
    """Stands in for torch.Tensor."""

    def __init__(self, memory):
        self.memory = memory

    def untyped_storage(self):
        return self.memory


class Wrapped(Tensor):
    """A quantised tensor: its own memory is a fiction, the parts are real. They are made at each access."""

    def __init__(self, *memories):
        super().__init__(Memory(0, 1 << 40))
        self.memories = memories

    def __tensor_flatten__(self):
        return [f"part{i}" for i in range(len(self.memories))], None

    def __getattr__(self, name):
        if name.startswith("part"):
            return Tensor(self.memories[int(name[4:])])
        raise AttributeError(name)


class Layer:
    def __init__(self, **parts):
        vars(self).update(parts)


class Tests(unittest.TestCase):
    def setUp(self):
        holder = tempfile.TemporaryDirectory()
        self.addCleanup(holder.cleanup)
        self.folder = Path(holder.name)

    def tasks(self, *lines):
        path = self.folder / "tasks.jsonl"
        path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines), encoding="utf-8")
        return q.load_tasks(path)

    def test_tasks_are_read_and_grouped(self):
        other = {**TASK, "seed": 2}
        tasks = self.tasks(TASK, "", {**TASK, "number": 1}, other)
        self.assertEqual(tasks[0], TASK)
        self.assertEqual(q.groups_of(tasks), {("niah_depths", 64, 1): tasks[:2], ("niah_depths", 64, 2): [other]})

    def test_bad_tasks_are_refused_by_line(self):
        for line, says in [("{", "tasks.jsonl:2"), ({"suite": "x"}, "no 'tokens'"), ("3", "tasks.jsonl:2"),
                           ({**TASK, "questions": [{**QUESTION, "rule": "ends"}]}, "'ends' is neither"),
                           ({**TASK, "questions": [{**QUESTION, "answers": []}]}, "no answers"),
                           ({**TASK, "questions": [{"rule": "begins", "answers": ["x"]}]}, "no 'tokens'")]:
            with self.assertRaisesRegex(ValueError, says):
                self.tasks(TASK, line)
        with self.assertRaisesRegex(ValueError, "holds no task"):
            self.tasks("")

    def test_the_rule_is_evaluates(self):
        cases = json.loads((ROOT / "tests" / "tools" / "data" / "scored_answers.json").read_text(encoding="utf-8"))
        self.assertGreater(len(cases), 5)
        for case in cases:
            self.assertEqual(q.score(case, case["output"]), case["found"], case)

    def test_begins(self):
        question = {"rule": "begins", "answers": ["The key"]}
        self.assertEqual([q.score(question, said) for said in ("The key.", "the key", " The key", "")], [1, 0, 0, 0])

    def test_choices_are_ranked_by_byte(self):
        question = {"choices": [{"text": "é"}, {"text": "abcd"}], "answers": ["abcd"]}
        self.assertEqual(q.best_choice(question, [-2, -3.9]), 1)  # -1 and -0.975 a byte
        self.assertEqual(q.best_choice(question, [-2, -4.1]), 0)

    def test_results_are_continued(self):
        path = self.folder / "out.json"
        self.assertEqual(q.load_points(path, {}), {})
        point = dict(zip(q.POINT_KEYS, ("niah_depths", 64, 1, "snapkv", 4, "text")), marks="10")
        q.write_points(path, "ask.py", {"dtype": "bfloat16"}, [point])
        self.assertEqual(q.load_points(path, {"dtype": "bfloat16"}), {q.key_of(point): point})
        self.assertEqual([entry.name for entry in self.folder.iterdir()], ["out.json"])
        with self.assertRaisesRegex(ValueError, "other settings"):
            q.load_points(path, {"dtype": "float32"})

    def test_each_memory_counts_once(self):
        one, two, three = Memory(100, 1000), Memory(200, 10), Memory(300, 1)
        cache = Layer(layers=[Layer(keys=Tensor(one), values=Tensor(one)), Layer(keys=Tensor(two), bits=4, name="x")],
                      quantised={"a": (Wrapped(three, *(Memory(400 + i, 5) for i in range(9))), {"scale": Tensor(two)})},
                      dtype=float)
        cache.itself = cache
        self.assertEqual(held_bytes.held_bytes(cache), 1056)
        self.assertEqual(held_bytes.held_bytes(cache, [Tensor(Memory(500, 7)), None]), 1063)
        self.assertEqual(held_bytes.held_bytes(), 0)

    def results(self, name, settings, points):
        (self.folder / name).write_text(json.dumps({"settings": settings, "points": points}), encoding="utf-8")
        return str(self.folder / name)

    def test_the_table_and_the_agreement(self):
        at = {"suite": "niah_depths", "tokens": 64, "seed": 1}
        ours = self.results("ours.json", {"compress": "text"}, [
            {**at, "method": "full", "marks": "11", "kv_bytes": 100, "row_bytes": 90, "said": [[5, 6], [7]]},
            {**at, "method": "snapkv", "share": 0.25, "marks": "10", "kv_bytes": 30, "row_bytes": 22}])
        theirs = self.results("theirs.json", {}, [
            {**at, "plan": "full", "ratio": 1, "compress": "text", "marks": "11", "kv_bytes": 200, "row_bytes": 200,
             "said": [[5, 6], [7, 8]]},
            {**at, "plan": "adakv", "ratio": 4, "compress": "text", "marks": "00", "kv_bytes": 200, "row_bytes": 50},
            {**at, "plan": "snapkv", "ratio": 32, "compress": "text", "refused": "ValueError: no"}])
        command = [sys.executable, str(ROOT / "bench" / "peers" / "table.py"), "--ours", ours, "--theirs", theirs]
        lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
        self.assertIn("| kvpolicy | full |  |  | 100 %, 100 % |", lines)
        self.assertIn("| kvpolicy | snapkv | before the question | 1/4 | 50 %, 30 % (24 %) |", lines)
        self.assertIn("| kvpress | adakv | before the question | 1/4 | 0 %, 100 % (25 %) |", lines)
        self.assertIn("| kvpress | snapkv | before the question | 1/32 | refused |", lines)
        self.assertEqual(table.agreement([table.load(ours)], [table.load(theirs)]), (2, 1, 3, 4))


if __name__ == "__main__":
    unittest.main()
