# SPDX-License-Identifier: Apache-2.0
"""scripts/test: its stages, its rota and its limit, with stand-ins for all that it runs."""
import os
import re
import shutil
import signal
import subprocess
import tempfile
import unittest
from pathlib import Path

SCRIPTS = Path(__file__).resolve().parents[2] / "scripts"
# The parts of each day.
ROTA = [["x86-64", "x86-64-v2", "smoke"], ["kernels"], ["ways"], ["x86-64-v3", "fuzz"], ["aarch64"], ["ptxas"]]
PARTS = [part for parts in ROTA for part in parts]
DAY = 86400


class Stages(unittest.TestCase):
    def setUp(self):
        self.folder = Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.folder)
        (self.folder / "scripts").mkdir()
        for name in ("test", "lib.sh"):
            shutil.copy(SCRIPTS / name, self.folder / "scripts")
        (self.folder / "bin").mkdir()
        self.log = self.folder / "log"
        self.log.touch()
        self.stand_in("bin/cmake")
        # Of two tests one is a program of doctest's with three cases.
        self.stand_in("bin/ctest", 'mkdir -p build/$2/Testing/Temporary',
                      'cat >build/$2/Testing/Temporary/LastTest.log <<EOT',
                      '1/2 Testing: policy', '[doctest] test cases: 3 | ${GOOD:-3} passed | ${BAD:-0} failed | 0 skipped',
                      '${POLICY:-Test Passed.}', '2/2 Testing: docs.tables', 'Test Passed.', 'EOT', 'exit ${BAD:-0}')
        for name in ("nvcc", "python3", "clang++-14", "clang++-18", "doxygen", "aarch64-linux-gnu-g++", "qemu-aarch64-static"):
            self.stand_in("bin/" + name)
        for name in ("docs", "compile-cost", "gpu-registers"):
            self.stand_in("scripts/" + name)
        for name, passed in (("test-aarch64", 20), ("test-packages", 30), ("fuzz", 40)):
            self.stand_in("scripts/" + name, f"echo '{passed} passed, 0 failed'")
        (self.folder / "tests/fuzz").mkdir(parents=True)
        (self.folder / "tests/fuzz/json_fuzz.cpp").touch()

    def stand_in(self, name, *lines):
        """A program that writes down how it was called and does `lines`."""
        path = self.folder / name
        path.write_text("\n".join(["#!/usr/bin/env bash", f'echo "${{0##*/}} $*" >>"{self.log}"', *lines, ""]))
        path.chmod(0o755)

    def start(self, *arguments, day=0, **environment):
        self.stand_in("bin/date", f'if [ "$*" = "-u +%s" ]; then echo {day * DAY + 100}; else exec /usr/bin/env -i /bin/date "$@"; fi')
        outside = {name: value for name, value in os.environ.items() if name != "KVPOLICY_DEADLINE"}  # of the run that tests this
        return subprocess.Popen([self.folder / "scripts/test", *arguments], text=True, start_new_session=True,
                                stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
                                env={**outside, "PATH": f"{self.folder / 'bin'}:{outside['PATH']}", "KVPOLICY_SKIP_PACKAGES": "1",
                                     **environment})

    def run_test(self, *arguments, **how):
        """(exit status, output, how the stand-ins were called)"""
        self.log.write_text("")
        child = self.start(*arguments, **how)
        output, _ = child.communicate()
        return child.returncode, output, self.log.read_text()

    def test_the_library_alone(self):
        status, output, called = self.run_test()
        self.assertEqual((status, output.splitlines()[-1]), (0, "4 passed, 0 failed"), output)
        self.assertIn("--target library_tests", called)
        self.assertIn("-L ^library$", called)
        self.assertNotRegex(called, "asan|test-packages|docs")
        self.assertIn("./scripts/test --all", output)
        self.assertNotIn("rota:", output)

    def test_every_stage_counts(self):
        status, output, called = self.run_test("--all", "--rota", "all")
        self.assertEqual(status, 0, output)
        self.assertNotIn("library", called)
        # Twice three cases and a test, nvcc and the site, and what the scripts say.
        self.assertEqual(output.splitlines()[-1], "100 passed, 0 failed")
        self.assertIn("-DKVPOLICY_BUILD_SMOKE_RUNS=ON", called)
        self.assertIn("-DKVPOLICY_BUILD_SMOKE_RUNS=OFF", self.run_test("--stage", "release", "--rota", "none")[2])
        for line in ("ctest --preset release", "ctest --preset asan", "cmake --preset cuda", "docs", "test-aarch64", "test-packages",
                     "fuzz"):
            self.assertRegex(called, rf"(?m)^{line}\b")

    def test_chosen_stages(self):
        status, output, called = self.run_test("--stage", "docs", "--stage", "fuzz")
        self.assertEqual((status, output.splitlines()[-1]), (0, "41 passed, 0 failed"), output)
        self.assertNotRegex(called, "(?m)^(cmake|ctest|test-packages)")
        self.assertEqual(self.run_test("--all", "--stage", "docs")[0], 2)
        for wrong in (["--stage", "nothing"], ["--stage"], ["--rota", "x86"], ["--minutes", "0"], ["--minutes"], ["--fuzz-seconds", "x"]):
            status, output, called = self.run_test(*wrong)
            self.assertEqual((status, called), (2, ""), wrong)
            self.assertIn(wrong[0] + " needs", output)
        self.assertEqual(self.run_test("other")[0], 2)

    def test_failures_count(self):
        status, output, _ = self.run_test("--stage", "asan", GOOD="1", BAD="2", POLICY="Test Failed.")
        self.assertEqual((status, output.splitlines()[-1]), (1, "2 passed, 2 failed"), output)
        self.stand_in("scripts/docs", "exit 1")
        status, output, _ = self.run_test("--stage", "docs", "--stage", "packages")
        self.assertEqual((status, output.splitlines()[-1]), (1, "30 passed, 1 failed"), output)
        self.stand_in("bin/cmake", 'case "$*" in *cuda_programs*) echo no such kernel; exit 1 ;; esac')
        status, output, _ = self.run_test("--stage", "cuda", "--stage", "asan")
        self.assertEqual((status, output.splitlines()[-1]), (1, "4 passed, 1 failed"), output)
        self.assertIn("no such kernel", output)
        self.stand_in("bin/cmake")
        self.stand_in("bin/python3", 'case "$*" in *all_compiled*) echo this is not compiled; exit 1 ;; esac')
        status, output, called = self.run_test("--stage", "cuda")
        self.assertEqual((status, output.splitlines()[-1]), (1, "0 passed, 1 failed"), output)
        self.assertIn("this is not compiled", output)
        self.assertIn("--target cuda_programs", called)
        self.assertIn("python3 tests/cuda/gpu/all_compiled.py build/ptx", called)

    def test_a_skipped_stage_is_named_and_not_passed(self):
        (self.folder / "bin/nvcc").unlink()
        status, output, _ = self.run_test("--stage", "cuda", "--stage", "docs", PATH=f"{self.folder / 'bin'}:/usr/bin:/bin")
        self.assertEqual((status, output.splitlines()[-2:]), (0, ["1 skipped: the stage cuda", "1 passed, 0 failed"]), output)
        self.assertIn("skipping stage cuda: nvcc is not on the PATH", output)

    def test_each_part_has_its_day(self):
        for day in range(10, 10 + len(ROTA)):
            _, output, called = self.run_test("--all", day=day)
            seen = re.findall(r"(?m)^rota: this run has (.*)$", output.split("== release")[0])
            self.assertEqual(seen, ROTA[day % len(ROTA)])
            left = re.search(r"(?m)^rota: this run leaves out ([^(]*) \(", output)[1].split()
            self.assertEqual(sorted([*seen, *left]), sorted(PARTS))
            targets = re.search("KVPOLICY_TEST_CPU_TARGETS=(\S*)", called)[1].split(";")
            self.assertEqual(targets, [name for name in seen if name.startswith("x86-64")] or [""])
            self.assertEqual("EVERY_KERNEL=ON" in called, "kernels" in seen)
            self.assertEqual("--every-way" in called, "ways" in seen)
            self.assertEqual("--preset cuda" in called, "ptxas" in seen)
            self.assertIn("--preset ptx", called)
            for stage, command in (("fuzz", "fuzz"), ("aarch64", "test-aarch64")):
                self.assertEqual(bool(re.search(rf"(?m)^{command}\b", called)), stage in seen)

    def test_parts_by_name(self):
        _, output, called = self.run_test("--all", "--rota", "all")
        self.assertNotIn("leaves out", output)
        self.assertIn("x86-64;x86-64-v2;x86-64-v3", called)
        _, output, called = self.run_test("--rota", "none", "--stage", "release")
        self.assertIn("leaves out x86-64 x86-64-v2 smoke x86-64-v3 (", output)
        _, output, called = self.run_test("--all", "--rota", "x86-64-v2", "--rota", "ways")
        self.assertIn("CPU_TARGETS=x86-64-v2 ", called)
        self.assertIn("--every-way", called)

    def test_the_limit_names_the_stage(self):
        # The limit's own signal, to all that the run has started, once the stage has begun.
        begun = self.folder / "begun"
        os.mkfifo(begun)
        self.stand_in("scripts/test-packages", f"echo >'{begun}'", "exec sleep infinity")
        child = self.start("--minutes", "88", "--stage", "docs", "--stage", "packages", KVPOLICY_DEADLINE="9000")
        with open(begun) as pipe:
            pipe.read()
        os.killpg(child.pid, signal.SIGTERM)
        output, _ = child.communicate()
        self.assertEqual(child.returncode, 1)
        self.assertIn("== Stopped after 88 minutes, in stage packages", output)
        self.assertRegex(output, r"(?m)^ +\d+ s  docs: the site")
        self.assertRegex(output, r"(?m)^  after \d+ minutes, -?\d+ are left$")
        self.assertEqual(output.splitlines()[-1], "1 passed, 1 failed")

    def test_the_limit_is_set(self):
        # A stand-in for timeout, since a minute is too long to wait for.
        self.stand_in("bin/timeout", 'shift 2', 'exec "$@"')
        status, output, called = self.run_test("--minutes", "3", "--stage", "docs")
        self.assertEqual(status, 0, output)
        self.assertRegex(called, r"(?m)^timeout --kill-after=30 3m .*/scripts/test --minutes 3 --stage docs$")
        self.assertRegex(output, r"(?m)^  after 0 minutes, [23] are left$")


if __name__ == "__main__":
    unittest.main()
