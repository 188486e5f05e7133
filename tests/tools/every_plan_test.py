#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Every tool that takes a plan, with every kind of plan: what it prints is not what it prints for `full`, or it refuses the plan and
says why. A tool that takes a plan and carries out a part of it does neither.

  tests/tools/every_plan_test.py build/release/examples
"""
import json
import pathlib
import re
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROGRAMS = None
MODEL = "reference_model/weights/keyfinder"
TOKENS = 602  # more than quantised heads keep exact
# One plan for each name that the tools' help lists, small enough to matter for such a text.
PLANS = ["sink_recent:4,8", "int8", "int6", "int5", "int4", "int8:halves=yes", "int2:normal=values", "fp8", "mxfp4", "nvfp4", "bounded:0.3",
         "k8v4", "k4v2", "kivi2", "kivi4", "hf4", "hf2", "chunk:16,32", "quest:16,32", "duo:0.5", "headkv:16", "snapkv:16", "adakv:16",
         "criticalkv:16", "h2o:16", "tova:16", "keynorm:16", "keydiff:16", "expected:16", "kvzip:16", "pyramid:32", "streaming_llm:4,12",
         "search:0.125,600", "duo+int4:0.5"]


def name_of(plan):
    return re.match(r"[a-z_0-9+]+", plan)[0]


def tokens():
    text = (ROOT / "reference_model/weights/heldout_kjv.txt").read_bytes()
    return ",".join(str(byte) for byte in text[:TOKENS])


def run(program, *arguments):
    """(what it says as JSON, None) or (None, why not)."""
    done = subprocess.run([PROGRAMS / program, "--model", MODEL, "--tokens", tokens(), "--json", *arguments], cwd=ROOT, capture_output=True, text=True,
                          check=False)
    return (json.loads(done.stdout), None) if done.returncode == 0 else (None, done.stderr)


class EveryPlan(unittest.TestCase):
    def walk(self, program, seen, *arguments, refuses=()):
        """`seen` takes from a tool's JSON what its plan decides."""
        full = seen(run(program, "--plan", "full", *arguments)[0])
        refused = set()
        for plan in PLANS:
            with self.subTest(program=program, plan=plan):
                said, why = run(program, "--plan", plan, *arguments)
                if said is None:
                    self.assertRegex(why, rf"^{program}: .*\w", "no reason")
                    refused.add(name_of(plan))
                else:
                    self.assertNotEqual(seen(said), full, "prints what it prints for full")
        self.assertEqual(refused, set(refuses))

    def test_the_table_has_every_name(self):
        shown = subprocess.run([PROGRAMS / "logits", "--help"], capture_output=True, text=True, check=True).stdout
        listed = shown[shown.index("Plans:\n"):shown.index("What a name leaves open")]
        names = set()
        for column in re.findall(r"^  (\S.{1,19})", listed, re.MULTILINE):
            names |= {name_of(word) for word in column.split() if re.match(r"[a-z]", word)}
        self.assertGreater(len(names), 30)
        self.assertEqual(names - {name_of(plan) for plan in PLANS}, {"full"})

    def test_logits(self):
        seen = lambda said: [row["logits"] for row in said["rows"]]
        acts_after_prompt = {"bounded", "chunk", "quest", "headkv", "snapkv", "adakv", "criticalkv", "h2o", "tova", "keynorm", "keydiff",
                             "expected", "kvzip", "pyramid", "search"}
        self.walk("logits", seen, refuses=acts_after_prompt)
        self.walk("logits", seen, "--prompt", str(TOKENS - 2), refuses={"kvzip"})

    def test_generate(self):
        self.walk("generate", lambda said: [said["kv_bytes"], said["kv_bytes_read_per_token"]], "--max-new", "2")

    def test_visualize(self):
        seen = lambda said: [[head["bytes"], head["bytes_read"], head["rows_kept"]] for head in said["heads"]]
        with tempfile.TemporaryDirectory() as folder:
            self.walk("visualize", seen, "--max-new", "2", "--out", f"{folder}/page.html", refuses={"kvzip"})


if __name__ == "__main__":
    PROGRAMS = pathlib.Path(sys.argv.pop(1)).resolve()
    unittest.main(verbosity=2)
