# SPDX-License-Identifier: Apache-2.0
"""scripts/test-cost over logs that were written by hand."""
import json
import shutil
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "test-cost"
STAGES = "100 release: g++ 12\n70 asan: AddressSanitizer and UBSan, clang (failed)\n"
# start, end (ms), time, output, hash; a library is no object, and what was compiled twice counts once.
NINJA = """# ninja log v5
0\t9000\t0\ttests/CMakeFiles/test_plan.dir/batches/plan.cpp.o\ta
0\t1500\t0\ttests/CMakeFiles/test_plan.dir/other.cpp.o\tb
1500\t1750\t0\tlibkvpolicy.a\tc
2000\t4000\t0\ttests/CMakeFiles/test_plan.dir/batches/plan.cpp.o\td
4000\t4500\t0\tCMakeFiles/kvpolicy_compiled.dir/compiled/c.cpp.o\te
"""
CTEST = """1/2 Testing: plan
"plan" start time: Nov 28 09:00 UTC
"plan" end time: Nov 28 09:01 UTC
"plan" time elapsed: 00:01:02
"docs.tables" time elapsed: 01:00:00
"""


class Cost(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.build = Path(folder.name)
        self.write("logs/stages", STAGES)
        self.write("logs/rota", "ways fuzz\n")
        self.write("release/.ninja_log", NINJA)
        self.write("asan/Testing/Temporary/LastTest.log", CTEST)

    def write(self, name, text):
        (self.build / name).parent.mkdir(parents=True, exist_ok=True)
        (self.build / name).write_text(text)

    def ask(self, *options):
        return subprocess.run([sys.executable, SCRIPT, "--build", self.build, *options], capture_output=True, text=True, check=False)

    def test_json(self):
        found = json.loads(self.ask("--json").stdout)
        self.assertEqual(found["stages"], [{"name": "release", "seconds": 100}, {"name": "asan", "seconds": 70}])
        self.assertEqual(found["presets"], [{"preset": "release", "compiling": 4, "running": 0}, {"preset": "asan", "compiling": 0, "running": 3662}])
        self.assertEqual([(one["target"], one["objects"], one["seconds"]) for one in found["targets"]],
                         [("test_plan", 2, 3.5), ("kvpolicy_compiled", 1, 0.5)])
        self.assertEqual([one["seconds"] for one in found["objects"]], [2.0, 1.5, 0.5])
        self.assertEqual([(one["name"], one["seconds"]) for one in found["tests"]], [("docs.tables", 3600), ("plan", 62)])
        self.assertGreater(found["context"]["cores"], 0)
        self.assertEqual(found["context"]["rota"], ["ways", "fuzz"])

    def test_what_an_object_instantiates(self):
        compiler = shutil.which("c++") or self.skipTest("c++ is not on the PATH")
        source = self.build / "one.cpp"
        source.write_text("""namespace ours {
template <class T> struct Cache { T* take(T* (*from)(int)) { return from(1) + 1; } };
template <class T> Cache<T> cache(T) { return {}; }
template struct Cache<Cache<int>>;
template Cache<int> cache(int);
}
""")
        made = self.build / "release/tests/CMakeFiles/test_plan.dir/other.cpp.o"
        made.parent.mkdir(parents=True)
        subprocess.run([compiler, "-O0", "-c", source, "-o", made], check=True)
        objects = json.loads(self.ask("--json").stdout)["objects"]
        self.assertEqual([{each["name"] for each in one["instantiates"]} for one in objects],
                         [set(), {"ours::Cache", "ours::cache"}, set()])
        self.assertGreater(objects[1]["instantiates"][0]["bytes"], 0)
        self.assertIn("other.cpp.o (ours::Cache, ours::cache)", self.ask().stdout)

    def test_text(self):
        shown = self.ask("--top", "1").stdout
        self.assertIn("release: 4 s of compiling, 0 s of running", shown)
        self.assertIn("docs.tables", shown)
        self.assertNotIn("asan: plan", shown)

    def test_keep(self):
        results = self.build / "results"
        results.mkdir()
        self.assertEqual(self.ask("--keep", "cold_2", "--results", results).returncode, 0)
        kept = json.loads((results / "test_cost_cold_2.json").read_text())
        found = json.loads(self.ask("--json", "--top", "50").stdout)
        self.assertEqual(kept, {"name": "cold_2", **found})

    def test_keep_needs_a_name(self):
        refused = self.ask("--keep", "../cold")
        self.assertEqual(refused.returncode, 2)
        self.assertIn("needs a name of small letters, digits and underscores, not '../cold'", refused.stderr)

    def test_without_a_run(self):
        (self.build / "logs/stages").unlink()
        refused = self.ask()
        self.assertEqual(refused.returncode, 1)
        self.assertIn("is missing: ./scripts/test writes it at its end", refused.stderr)


if __name__ == "__main__":
    unittest.main()
