# SPDX-License-Identifier: Apache-2.0
"""scripts/affected in a small project of its own."""
import json
import shutil
import subprocess
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "scripts" / "affected"
FILES = {
    "include/kvpolicy/core/row.hpp": "#pragma once\n",
    "include/kvpolicy/policy/window.hpp": "#include <kvpolicy/core/row.hpp>\n",
    "include/kvpolicy/plan/plan.hpp": "  #  include <kvpolicy/policy/window.hpp>\n",
    "include/kvpolicy/cpu/one-inl.hpp": '#include "two-inl.hpp"\n',
    "include/kvpolicy/cpu/two-inl.hpp": '#include "one-inl.hpp"\n',
    "kernels/kvpolicy/cuda/kernels/score.cuh": "#pragma once\n",
    "reference_model/run.hpp": "#pragma once\n",
    "reference_model/run.cpp": '#include "reference_model/run.hpp"\n',
    "tests/core/row_test.cpp": "#include <kvpolicy/core/row.hpp>\n",
    "tests/policy/window_test.cpp": "#include <kvpolicy/policy/window.hpp>\n",
    "tests/plan/plan_test.cpp": "#include <kvpolicy/plan/plan.hpp>\n",
    "tests/cpu/one_test.cpp": "#include <kvpolicy/cpu/one-inl.hpp>\n",
    "tests/cuda/score_test.cpp": '#include "support/score_oracle.hpp"\n',
    "tests/cuda/support/score_oracle.hpp": "#include <kvpolicy/cuda/kernels/score.cuh>\n",
    "tests/model/run_test.cpp": '#include "../../reference_model/run.hpp"\n',
    "docs/page.md": "text\n",
}


class Affected(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        for name, text in FILES.items():
            self.write(name, text)
        (self.folder / "scripts").mkdir()
        shutil.copy(SCRIPT, self.folder / "scripts")
        self.git("init", "-q", "-b", "main")
        self.commit()

    def write(self, name, text):
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def git(self, *arguments):
        subprocess.run(["git", "-C", self.folder, "-c", "user.name=test", "-c", "user.email=test@example.invalid", *arguments], check=True)

    def commit(self):
        self.git("add", "-A")
        self.git("commit", "-qm", "a change")

    def ask(self, *arguments):
        return subprocess.run([self.folder / "scripts" / "affected", *arguments], capture_output=True, text=True, check=False)

    def affected(self, *arguments):
        return json.loads(self.ask("--json", *arguments).stdout)

    def reached(self, *arguments):
        return [(test["file"], test["distance"], test["near"]) for test in self.affected(*arguments)["tests"]]

    def change(self, name):
        self.write(name, FILES[name] + "// changed\n")

    def test_nothing(self):
        self.assertEqual(self.affected(), {"base": "HEAD", "changed": [], "layout": [], "headers": [], "tests": []})
        self.assertEqual(self.ask().stdout, "0 files differ from HEAD\n")

    def test_a_header_reaches_tests_by_way_of_others(self):
        self.change("include/kvpolicy/core/row.hpp")
        self.assertEqual(self.affected()["headers"], ["include/kvpolicy/core/row.hpp"])
        # window.hpp includes the change, so its test is near; plan.hpp includes window.hpp alone.
        self.assertEqual(self.reached(), [("tests/core/row_test.cpp", 1, True), ("tests/policy/window_test.cpp", 2, True),
                                        ("tests/plan/plan_test.cpp", 3, False)])
        self.assertEqual(self.ask("--list", "tests").stdout.split(), ["tests/core/row_test.cpp", "tests/policy/window_test.cpp"])
        self.assertIn("tests/plan/plan_test.cpp, not near\n", self.ask().stdout)

    def test_the_nearest_comes_first(self):
        self.change("tests/plan/plan_test.cpp")
        self.change("include/kvpolicy/core/row.hpp")
        self.assertEqual(self.reached()[0], ("tests/plan/plan_test.cpp", 0, True))

    def test_a_source_stands_for_its_header(self):
        self.change("reference_model/run.cpp")
        self.assertEqual(self.reached(), [("tests/model/run_test.cpp", 1, True)])
        self.assertEqual(self.affected()["headers"], [])
        self.assertEqual(self.affected()["layout"], ["reference_model/run.cpp"])

    def test_circles_end(self):
        self.change("include/kvpolicy/cpu/two-inl.hpp")
        self.assertEqual(self.reached(), [("tests/cpu/one_test.cpp", 2, True)])
        self.assertEqual(self.affected()["headers"], [])  # not meant to be compiled alone

    def test_kernels_and_support(self):
        self.change("kernels/kvpolicy/cuda/kernels/score.cuh")
        self.assertEqual(self.affected()["headers"], ["kernels/kvpolicy/cuda/kernels/score.cuh"])
        self.assertEqual(self.reached(), [("tests/cuda/score_test.cpp", 2, True)])

    def test_new_and_deleted_files(self):
        self.write("tests/core/new_test.cpp", "#include <kvpolicy/core/row.hpp>\n")
        (self.folder / "include/kvpolicy/policy/window.hpp").unlink()
        found = self.affected()
        self.assertEqual(found["changed"], ["include/kvpolicy/policy/window.hpp", "tests/core/new_test.cpp"])
        self.assertEqual((found["layout"], found["headers"]), (["tests/core/new_test.cpp"], []))
        # Who includes what is gone will not compile, and has to be tried.
        self.assertEqual(self.reached(), [("tests/core/new_test.cpp", 0, True), ("tests/policy/window_test.cpp", 1, True),
                                        ("tests/plan/plan_test.cpp", 2, True)])

    def test_since_a_commit(self):
        self.change("tests/core/row_test.cpp")
        self.commit()
        self.assertEqual(self.affected()["changed"], [])
        self.assertEqual(self.affected("--since", "HEAD~1")["changed"], ["tests/core/row_test.cpp"])
        refused = self.ask("--since", "nowhere")
        self.assertEqual(refused.returncode, 1)
        self.assertEqual(refused.stderr, "error: --since nowhere: git knows no such commit\n")

    def test_pages_touch_no_test(self):
        self.change("docs/page.md")
        found = self.affected()
        self.assertEqual((found["changed"], found["layout"], found["tests"]), (["docs/page.md"], [], []))


if __name__ == "__main__":
    unittest.main()
