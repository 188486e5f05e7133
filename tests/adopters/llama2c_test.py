#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests examples/adopters/llama2.c on the engine's own source and its smallest model: the edited program, compiled as
C, gives the tokens of the original; caches have the bytes that are counted here; saved prompts go on; refusals.

usage: llama2c_test.py LIBRARY [C COMPILER]

The engine's folder (run.c) is KVPOLICY_LLAMA2C_SOURCE, or ../shared/adopters/llama2.c beside the repository; the
model's (checkpoint_legacy.bin, tokenizer.bin) is KVPOLICY_STORIES260K, or ../shared/real_model/stories260K. Without
them the script says so and exits with 77.
"""
import collections
import json
import os
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "examples" / "adopters" / "llama2.c"))
import adopt  # noqa: E402
import engine  # noqa: E402


def at_hand(variable, beside, *files):
    folder = Path(os.environ.get(variable) or ROOT.parent / beside)
    missing = [name for name in files if not (folder / name).is_file()]
    if missing:
        print(f"skipped: there is no {folder / missing[0]} (set {variable} to its folder)")
        sys.exit(77)
    return folder


SOURCE = at_hand("KVPOLICY_LLAMA2C_SOURCE", "shared/adopters/llama2.c", "run.c") / "run.c"
MODEL = at_hand("KVPOLICY_STORIES260K", "shared/real_model/stories260K", "checkpoint_legacy.bin", "tokenizer.bin")
LAYERS, KV_HEADS, HEAD_DIM = 5, 4, 8
SIDES = LAYERS * KV_HEADS * 2  # keys and values of each head
PAGE = 64
PROMPT = "Once upon a time, there was a little girl named Lily. She had a red ball and a big dog."
LIMIT = 60


class Adopted(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        cls.holder = tempfile.TemporaryDirectory()
        cls.folder = Path(cls.holder.name)
        cls.edited_source = cls.folder / "run.c"
        cls.changed = engine.adopt(SOURCE, cls.edited_source)
        flags = ["-std=gnu11", "-O2", "-Werror=implicit-function-declaration"]
        cls.original = engine.build(COMPILER, SOURCE, cls.folder / "original", flags)
        cls.edited = engine.build(COMPILER, cls.edited_source, cls.folder / "edited", flags, LIBRARY)
        # The loop's OpenMP pragma is in a branch now. Threads would make a model this small slower.
        engine.build(COMPILER, cls.edited_source, cls.folder / "with_threads", flags + ["-fopenmp"], LIBRARY)

    @classmethod
    def tearDownClass(cls):
        cls.holder.cleanup()

    def answer(self, *options, prompt=PROMPT, steps=400, program=None):
        done = engine.run(program or self.edited, MODEL / "checkpoint_legacy.bin", MODEL / "tokenizer.bin", prompt,
                          steps, *options)
        self.assertEqual(done.status, 0, done.complaint)
        return done

    def refusal(self, *options, prompt=PROMPT):
        done = engine.run(self.edited, MODEL / "checkpoint_legacy.bin", MODEL / "tokenizer.bin", prompt, 100, *options)
        self.assertNotEqual(done.status, 0)
        self.assertGreater(done.status, 0, "ended by a signal")
        return done.complaint

    def pattern(self, name="pattern"):
        """Heads 0 and 2 of every layer keep all rows."""
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        (folder / "full_attention_heads.tsv").write_text("0.9\t0.1\t0.8\t0.2\n" * LAYERS)
        (folder / "config.json").write_text('{"sink_size": 4, "recent_size": 60}')
        return folder

    # ---- the edit

    def test_few_lines(self):
        before, after = (collections.Counter(path.read_text().split("\n")) for path in (SOURCE, self.edited_source))
        counted = sum((after - before).values()) + sum((before - after).values())
        self.assertLess(self.changed, LIMIT)
        self.assertEqual(self.changed, counted)

    def test_refuses_a_second_edit(self):
        text = self.edited_source.read_text()
        with self.assertRaisesRegex(RuntimeError, "run.c: not edited: .*kvpolicy already"):
            engine.adopt(self.edited_source, self.edited_source)
        self.assertEqual(self.edited_source.read_text(), text)

    def test_refuses_other_versions(self):
        """Each anchor in turn is missing, or there twice: it is named, and nothing is written."""
        lines = SOURCE.read_text().split("\n")
        for part, anchor, how, _ in adopt.EDITS:
            with self.subTest(part=part, anchor=anchor):
                number = adopt.only(adopt.part_of(lines, part), anchor, "the source")
                missing = lines[:number] + ["// another line"] + lines[number + 1:]
                twice = lines[:number + 1] + lines[number:]
                for changed in (missing, twice):
                    with self.assertRaises(adopt.Refused) as refused:
                        adopt.edited(changed)
                    self.assertIn(f'"{anchor}"', str(refused.exception))
                if part:
                    header = adopt.only(list(enumerate(lines)), part, "the source")
                    with self.assertRaises(adopt.Refused) as refused:
                        adopt.edited(lines[:header] + lines[header + 1:])
                    self.assertIn(f'"{part}"', str(refused.exception))
                if how not in ("before", "after"):
                    piece = lines[:number] + [lines[number].replace(how, "?")] + lines[number + 1:]
                    with self.assertRaises(adopt.Refused):
                        adopt.edited(piece)
        other = self.folder / "other.c"
        other.write_text(SOURCE.read_text().replace("powf(10000.0f", "powf(1e4f"))
        out = self.folder / "not_written.c"
        with self.assertRaisesRegex(RuntimeError, r'other.c: not edited: .*"powf\(10000.0f,"'):
            engine.adopt(other, out)
        self.assertEqual([path.name for path in self.folder.glob("not_written*")], [])

    # ---- tokens

    def test_tokens_of_the_original(self):
        for prompt in (PROMPT, ""):
            expected = self.answer(prompt=prompt, program=self.original).text
            self.assertGreater(len(expected), 500)
            self.assertEqual(self.answer(prompt=prompt).text, expected, "without a plan")
            self.assertEqual(self.answer("-k", "full", "-b", 32, prompt=prompt).text, expected, "every row, float")
            half = self.answer("-k", "full", prompt=prompt).text
            same = os.path.commonprefix([half, expected])
            print(f"bfloat16 rows: the first {len(same)} of {len(expected)} characters are those of float")
            self.assertGreater(len(same), 100)
        # A window that is longer than the text keeps every row, so does a plan file that says so.
        expected = self.answer(program=self.original).text
        self.assertEqual(self.answer("-k", "sink_recent:0,1000", "-b", 32).text, expected)
        plan = self.folder / "plan.json"
        shape = {"layers": LAYERS, "q_heads": 8, "kv_heads": KV_HEADS, "head_dim": HEAD_DIM}
        plan.write_text(json.dumps({"format": "kvpolicy plan", "version": 1, "shape": shape,
                                    "settings": [{"policy": "full"}], "heads": [[0] * KV_HEADS] * LAYERS}))
        self.assertEqual(self.answer("-k", plan, "-b", 32).text, expected)
        self.assertEqual(self.answer("-r", 10000, program=self.edited).text, expected)
        self.assertNotEqual(self.answer("-r", 100).text, expected)

    # ---- bytes

    def test_bytes(self):
        bytes_of = {}
        for name, number_bytes, code_bytes, residual in [("full -b 32", 4, None, None), ("full", 2, None, None),
                                                         ("int8", 2, HEAD_DIM + 4, 128),
                                                         ("int8:16", 2, HEAD_DIM + 4, 16),
                                                         ("int4", 2, HEAD_DIM // 2 + 4, 128),
                                                         ("int4:16", 2, HEAD_DIM // 2 + 4, 16)]:
            done = self.answer("-k", *name.split())
            exact = HEAD_DIM * number_bytes
            # A token waits in the tail; a scale and a zero in half belong to the 8 channels of a row.
            if residual is None:
                pages = -(-done.tokens // PAGE)
                self.assertEqual(done.cache_bytes, SIDES * exact * (pages * PAGE + 1), name)
            else:
                least = SIDES * ((done.tokens - residual) * code_bytes + residual * exact)
                self.assertGreaterEqual(done.cache_bytes, least, name)
                self.assertLessEqual(done.cache_bytes, least + SIDES * (PAGE * code_bytes + (2 * PAGE + 1) * exact))
            self.assertGreater(done.tokens, 200)
            self.assertGreater(done.tokens_per_second, 0)
            bytes_of[name] = done.cache_bytes / done.tokens
        for smaller, larger in [("full", "full -b 32"), ("int8", "full -b 32"), ("int8:16", "full -b 32"),
                                ("int4", "int8"), ("int4:16", "int8:16"), ("int4:16", "int4"), ("int4:16", "full")]:
            self.assertLess(bytes_of[smaller], bytes_of[larger], f"{smaller}, {larger}")
        duo = self.answer("-k", f"duo@{self.pattern()}:0.5")
        streaming = SIDES // 2 * HEAD_DIM * 2
        pages = -(-duo.tokens // PAGE)
        self.assertGreaterEqual(duo.cache_bytes, streaming * (duo.tokens + 64))
        self.assertLessEqual(duo.cache_bytes, streaming * (pages * PAGE + 4 * PAGE + 2))

    # ---- saved prompts

    def test_saved_prompts(self):
        for number, plan in enumerate(["full", "full -b 32", "int8", "int4:16", "sink_recent:2,40",
                                       f"duo@{self.pattern()}:0.5", f"duo+int4@{self.pattern()}:0.5"]):
            for prompt in (PROMPT, ""):
                with self.subTest(plan=plan, prompt=prompt):
                    file = self.folder / f"prompt_{number}_{len(prompt)}.kvcache"
                    whole = self.answer("-k", *plan.split(), prompt=prompt)
                    first = self.answer("-k", *plan.split(), "-c", file, prompt=prompt)
                    self.assertEqual(first.text, whole.text)
                    saved = file.read_bytes()
                    for _ in range(2):
                        again = self.answer("-k", *plan.split(), "-c", file, prompt=prompt)
                        self.assertEqual(prompt + again.text, whole.text)
                        self.assertEqual((again.tokens, again.cache_bytes), (whole.tokens, whole.cache_bytes))
                    self.assertEqual(file.read_bytes(), saved)

    def test_other_saved_prompts_are_refused(self):
        file = self.folder / "one.kvcache"
        self.answer("-k", "full", "-c", file)
        self.assertIn("FormatError", self.refusal("-k", "full", "-c", file, prompt="Another prompt"))
        self.assertIn("FormatError", self.refusal("-k", "full", "-b", 32, "-c", file))
        self.assertIn("FormatError", self.refusal("-k", "int8", "-c", file))
        file.write_bytes(file.read_bytes()[:-3])
        self.assertIn("FormatError", self.refusal("-k", "full", "-c", file))
        self.assertIn("StorageError", self.refusal("-k", "full", "-c", self.folder / "none" / "file"))

    # ---- the benchmark

    def test_benchmark(self):
        """A tiny run measures each program at each length, and its page's table is made from it."""
        results = self.folder / "results"
        results.mkdir()
        command = [sys.executable, engine.FOLDER / "bench.py", "--source", SOURCE, "--library", LIBRARY, "--checkpoint",
                   MODEL / "checkpoint_legacy.bin", "--rows", "40", "200", "--tokens", "3", "--rounds", "1",
                   "--compiler", COMPILER[0], "--out", results / "llama2c_tiny.json"]
        environment = dict(os.environ, OMP_NUM_THREADS="1")
        done = subprocess.run(command, capture_output=True, text=True, env=environment)
        self.assertEqual(done.returncode, 0, done.stderr)
        cases = json.loads((results / "llama2c_tiny.json").read_text())["benchmarks"]
        self.assertEqual({case["rows"] for case in cases}, {0, 40, 200})
        for case in cases:
            self.assertGreater(case["ms"], 0)
            if case["name"].startswith("original"):
                self.assertEqual(case["cache_bytes"], SIDES * HEAD_DIM * 4 * (case["rows"] + 5))
        page = self.folder / "adoption.md"
        done = subprocess.run([sys.executable, ROOT / "bench" / "tables.py", "--results", results, "--page",
                               "docs/adoption.md", "--out", page], capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        self.assertIn("| duo, int4 | `-Ofast -march=native -fopenmp` | `-k duo+int4@PATTERN/:0.5 -b 16` |", page.read_text())

    # ---- refusals

    def test_refused_options(self):
        self.assertIn("known are full, int4", self.refusal("-k", "many"))
        self.assertIn("none.json", self.refusal("-k", self.folder / "none.json"))
        self.assertIn("sparsity", self.refusal("-k", f"duo@{self.pattern()}:2"))
        other = self.folder / "other_pattern"
        other.mkdir()
        (other / "full_attention_heads.tsv").write_text("0.9\t0.1\n")
        (other / "config.json").write_text('{"sink_size": 4, "recent_size": 60}')
        self.assertIn("ConfigError", self.refusal("-k", f"duo@{other}:0.5"))
        self.assertIn("dtype", self.refusal("-k", "full", "-b", 8))
        self.assertIn("cache is null", self.refusal("-c", self.folder / "no_plan.kvcache"))


if __name__ == "__main__":
    LIBRARY = Path(sys.argv[1]).resolve()
    COMPILER = sys.argv[2:3] or ["cc"]
    unittest.main(argv=sys.argv[:1] + sys.argv[3:], verbosity=2)
