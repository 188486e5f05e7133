# SPDX-License-Identifier: Apache-2.0
"""A GPU kit's run, with programs of a line each in place of the kit's, and scripts/gpu-results over what it leaves. The numbers are
those of the emulation (gpu_run/attention.json, by attention_cuda_smoke --smoke), as they are and with a GPU's name on them."""
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "scripts" / "gpu_kit" / "run"
RESULTS = ROOT / "scripts" / "gpu-results"
EMULATED = Path(__file__).resolve().parent / "gpu_run" / "attention.json"
PASSES = "[doctest] test cases:  3 |  3 passed | 0 failed | 9 skipped"
# Answers as nvidia-smi does.
GPU = 'case "$*" in *compute_cap*) echo 9.0 ;; *name,*) echo "NVIDIA H100 80GB HBM3, 580.1, 81559 MiB" ;; *) echo "NVIDIA H100 80GB HBM3" ;; esac'
# Writes the results that it was given, where Google Benchmark would.
BENCH = 'for one in "$@"; do case $one in --benchmark_out=*) cp "$(dirname "$0")/numbers.json" "${one#*=}" ;; esac; done\necho "decode/a/1Ki 3 us 4 us 2 bytes=7 us=3"'


def on_gpu(text):
    """The same results, as if a GPU had written them."""
    run = json.loads(text)
    run["context"] |= {"device": "NVIDIA H100 80GB HBM3", "driver": "CUDA 13.0", "target": "sm_90", "smoke": "no", "host_name": "somewhere"}
    return run


class Kit(unittest.TestCase):
    """A folder with `run` and programs; what is on the PATH besides the system's own is ours to say."""

    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.kit, self.path, self.out = (Path(folder.name) / name for name in ("kit", "path", "out"))
        self.kit.mkdir()
        self.path.mkdir()
        shutil.copy(RUN, self.kit / "run")
        (self.kit / "test_files_cuda").write_text("kivi_test\nother_test\n")
        (self.kit / "kit.json").write_text('{"version": "0.1.0", "commit": "abc", "target": "sm_90a", "compiler": "nvcc 13"}')
        # Nothing of the machine's own GPU, if it has one.
        for tool in ("bash", "dirname", "grep", "head", "sed", "tail", "tr", "cut", "tee", "tar", "gzip", "timeout", "mktemp", "mkdir", "mv", "cp", "cat", "rm"):
            (self.path / tool).symlink_to(shutil.which(tool))
        self.program("find", "echo /nowhere/libcublasLt.so.13", self.path)

    def program(self, name, text, folder=None):
        file = (folder or self.kit) / name
        file.write_text(f"#!/usr/bin/env bash\n{text}\n")
        file.chmod(0o755)

    def gpu(self):
        self.program("nvidia-smi", GPU, self.path)
        if not (self.path / "env").exists():
            (self.path / "env").symlink_to(shutil.which("env"))

    def run_kit(self, *options):
        done = subprocess.run(["bash", self.kit / "run", "--out", self.out, *options], capture_output=True, text=True, check=False,
                              env={"PATH": str(self.path), "HOME": os.environ.get("HOME", "/")})
        self.verdicts = {}  # of the parts that were asked for
        self.not_asked = set()
        if (self.out / "parts.tsv").exists():
            for line in (self.out / "parts.tsv").read_text().splitlines():
                part, verdict, _, note = line.split("\t")
                if verdict == "not asked":
                    self.not_asked.add(part)
                else:
                    self.verdicts[part] = (verdict, note)
        return done

    def results(self, *options):
        return subprocess.run([sys.executable, RESULTS, self.out, *options], capture_output=True, text=True, check=False)


class Run(Kit):
    def test_without_a_gpu_every_part_is_skipped_by_name(self):
        self.program("test_cuda_gpu", f"echo '{PASSES}'")
        done = self.run_kit()
        self.assertEqual(done.returncode, 1)
        self.assertEqual({verdict for verdict, _ in self.verdicts.values()}, {"skipped"})
        self.assertEqual(self.not_asked, set())
        self.assertIn("no NVIDIA GPU", self.verdicts["tests/cache_shapes"][1])
        self.assertIn(f"0 passed, 0 failed, {len(self.verdicts)} skipped", done.stdout)
        self.assertEqual(done.stdout.splitlines()[:-1], (self.out / "summary.txt").read_text().splitlines()[:len(done.stdout.splitlines()) - 1])

    def test_how_parts_end(self):
        self.gpu()
        self.program("test_cuda_gpu", f"""case $1 in
  *kivi*) echo 'skipped: no CUDA device' ;;
  *needle*) echo '[doctest] test cases: 0 | 0 passed' ;;
  *decode*) echo 'decode_test.cpp:7: ERROR: CHECK( a == b ) is NOT correct!'; exit 1 ;;
  *shapes*) kill -SEGV $$ ;;
  *) echo '{PASSES}' ;;
esac""")
        done = self.run_kit("--only", "^tests/")
        self.assertEqual(done.returncode, 1)
        self.assertEqual({part: self.verdicts[part][0] for part in ("tests/kivi", "tests/needle", "tests/decode", "tests/cache_shapes", "tests/other")},
                         {"tests/kivi": "skipped", "tests/needle": "failed", "tests/decode": "failed", "tests/cache_shapes": "failed", "tests/other": "ok"})
        self.assertIn("3 passed", self.verdicts["tests/other"][1])
        self.assertIn("CHECK( a == b )", done.stdout)
        self.assertEqual(self.verdicts["tests/demo"], ("skipped", "this kit has no test_tools_cuda_gpu"))
        # A file that comes early does not come again.
        self.assertEqual(len([line for line in (self.out / "parts.tsv").read_text().splitlines() if line.startswith("tests/kivi")]), 1)

    def test_all_that_is_asked_for_passes(self):
        self.gpu()
        self.program("test_cuda_gpu", f"echo '{PASSES}'")
        done = self.run_kit("--only", "^tests/(kivi|other)$")
        self.assertEqual((done.returncode, set(self.verdicts)), (0, {"tests/kivi", "tests/other"}))
        self.assertTrue({"tests/demo", "bench/duo", "memcheck/decode"} <= self.not_asked)
        self.assertNotIn("tests/demo", done.stdout)

    def test_when_the_time_is_over(self):
        self.gpu()
        self.program("test_cuda_gpu", f"echo '{PASSES}'")
        done = self.run_kit("--only", "^tests/kivi$", "--seconds", "1")
        self.assertEqual((done.returncode, self.verdicts["tests/kivi"][0]), (1, "not run"))

    def test_list_and_wrong_options(self):
        self.assertIn("tests/other", self.run_kit("--list").stdout)
        self.assertFalse(self.out.exists())
        for wrong in (["--no-such"], ["--seconds", "many"], ["--only"]):
            self.assertEqual(self.run_kit(*wrong).returncode, 2)


class Results(Kit):
    def setUp(self):
        super().setUp()
        self.gpu()
        self.program("attention_cuda_bench", BENCH)
        self.program("test_cuda_gpu", f"echo '{PASSES}'")
        # A project to write into: the pages, and the results that they are made from.
        self.project = self.out.parent / "project"
        shutil.copytree(ROOT / "bench" / "results", self.project / "bench" / "results", ignore=lambda folder, names: [name for name in names if name.startswith("gpu_nvidia")])
        shutil.copytree(ROOT / "docs", self.project / "docs", ignore=shutil.ignore_patterns("*.png", "*.svg", "pictures"))

    def measured(self, numbers, only="^(bench/(duo|low-bits)|tests/(prefill_hopper|other))$"):
        (self.kit / "numbers.json").write_text(json.dumps(numbers))
        return self.run_kit("--only", only)

    def page(self, name):
        return (self.project / "docs" / name).read_text(encoding="utf-8")

    def says(self, page, pattern):
        """Whether some line of a page matches; the page is too long for a message."""
        return any(re.search(pattern, line) for line in self.page(page).splitlines())

    def test_of_the_emulation_no_page_is_made(self):
        self.measured(json.loads(EMULATED.read_text()))
        before = {path: path.read_bytes() for path in self.project.rglob("*") if path.is_file()}
        refused = self.results("--root", self.project)
        self.assertNotEqual(refused.returncode, 0)
        self.assertIn("host emulation of tests/simt", refused.stderr)
        self.assertEqual(before, {path: path.read_bytes() for path in self.project.rglob("*") if path.is_file()})
        elsewhere = self.out.parent / "elsewhere"
        taken = self.results("--root", self.project, "--out", elsewhere)
        self.assertEqual(taken.returncode, 0, taken.stderr)
        kept = json.loads((elsewhere / "gpu_host_emulation_of_tests_simt_attention.json").read_text())
        self.assertEqual((kept["context"]["device"], kept["context"]["smoke"]), ("host emulation of tests/simt", "yes"))
        self.assertNotEqual(self.results("--root", self.project, "--out", self.project / "bench" / "results").returncode, 0)

    def test_of_a_gpu_the_pages_are_filled(self):
        self.assertTrue(self.says("performance.md", "No number on this page"))
        self.assertTrue(self.says("not_yet_measured.md", "whether results are right on a GPU"))
        self.measured(on_gpu(EMULATED.read_text()))
        done = self.results("--root", self.project)
        self.assertEqual(done.returncode, 0, done.stderr)
        kept = json.loads((self.project / "bench/results/gpu_nvidia_h100_80gb_hbm3_attention.json").read_text())
        self.assertNotIn("host_name", kept["context"])
        self.assertEqual(len(kept["benchmarks"]), len({case["name"] for case in kept["benchmarks"]}))
        self.assertFalse(self.says("performance.md", "No number on this page"))
        self.assertTrue(self.says("performance.md", "[*][*]NVIDIA H100 80GB HBM3[*][*], kit of abc for sm_90a: parts 4 ok, [0-9]+ not asked$"))
        # The worst of the cases that the goal is judged by.
        speedup = min(case["speedup"] for case in kept["benchmarks"] if case["name"].startswith("decode/duo_r50/"))
        self.assertTrue(self.says("performance.md", rf"^\| duo decode, r = 0.5 \|.*\| {speedup:.3g}x \(decode/duo_r50/32x8/517000\): "))
        # Two of all tests have passed: that answers nothing but Hopper's prompts, were they timed.
        self.assertTrue(self.says("not_yet_measured.md", "Run so far on NVIDIA H100"))
        self.assertTrue(self.says("not_yet_measured.md", "whether results are right on a GPU"))

    def test_what_all_its_parts_have_answered_is_no_longer_open(self):
        for name in ("test_model_cuda_gpu", "test_tools_cuda_gpu"):
            self.program(name, f"echo '{PASSES}'")
        self.measured(on_gpu(EMULATED.read_text()), "^bench/duo$")
        self.assertEqual(self.results("--root", self.project).returncode, 0)
        self.assertTrue(self.says("not_yet_measured.md", "whether results are right on a GPU"))
        self.measured(on_gpu(EMULATED.read_text()), "^(tests/|bench/low-bits)")
        self.assertEqual({verdict for verdict, _ in self.verdicts.values()}, {"ok"})
        self.assertEqual(self.results("--root", self.project, "--add").returncode, 0)
        self.assertFalse(self.says("not_yet_measured.md", "whether results are right on a GPU"))
        self.assertTrue(self.says("not_yet_measured.md", "every time and every bandwidth"))
        self.assertTrue(self.says("not_yet_measured.md", "ranks over NCCL"))
        # What the first run said of its part stays; and a part that fails after all opens the question again.
        parts = {part["part"]: part["verdict"] for part in
                 json.loads((self.project / "bench/results/gpu_nvidia_h100_80gb_hbm3_parts.json").read_text())["parts"]}
        self.assertEqual((parts["bench/duo"], parts["bench/low-bits"], parts["bench/prefill"]), ("ok", "ok", "not asked"))
        self.program("test_cuda_gpu", "exit 1")
        self.measured(on_gpu(EMULATED.read_text()), "^(tests/kivi|bench/duo)$")
        self.assertEqual(self.results("--root", self.project, "--add").returncode, 0)
        self.assertTrue(self.says("not_yet_measured.md", "whether results are right on a GPU"))

    def test_a_part_that_failed_answers_nothing(self):
        self.program("test_cuda_gpu", "exit 1")
        self.measured(on_gpu(EMULATED.read_text()))
        self.assertEqual(self.results("--root", self.project).returncode, 0)
        self.assertTrue(self.says("not_yet_measured.md", "whether results are right on a GPU"))
        self.assertTrue(self.says("performance.md", r"not ok: `tests/prefill_hopper` \(failed\), `tests/other` \(failed\)"))

    def test_of_tests_alone_it_is_kept_how_they_ended(self):
        self.measured(on_gpu(EMULATED.read_text()), "^tests/other$")
        self.assertEqual(self.results("--root", self.project).returncode, 0)
        self.assertTrue(self.says("performance.md", "[*][*]NVIDIA H100 80GB HBM3[*][*], kit of abc for sm_90a: parts 1 ok, "))

    def test_add(self):
        run = on_gpu(EMULATED.read_text())
        self.measured(run)
        self.assertEqual(self.results("--root", self.project).returncode, 0)
        name = self.project / "bench/results/gpu_nvidia_h100_80gb_hbm3_attention.json"
        before = json.loads(name.read_text())["benchmarks"]
        fewer = {**run, "benchmarks": run["benchmarks"][:1]}
        self.measured(fewer)
        self.assertEqual(self.results("--root", self.project, "--add").returncode, 0)
        self.assertEqual(sorted(case["name"] for case in json.loads(name.read_text())["benchmarks"]), sorted(case["name"] for case in before))
        self.assertEqual(self.results("--root", self.project).returncode, 0)
        self.assertEqual(len(json.loads(name.read_text())["benchmarks"]), 1)
        self.measured({**fewer, "context": {**fewer["context"], "driver": "CUDA 14.0"}})
        other = self.results("--root", self.project, "--add")
        self.assertIn("another driver (CUDA 13.0) than this run (CUDA 14.0)", other.stderr)

    def test_a_bench_that_was_stopped_keeps_its_cases(self):
        text = json.dumps(on_gpu(EMULATED.read_text()), indent=2)
        (self.kit / "numbers.json").write_text(text[:text.rindex("\n    }") - 9])
        self.run_kit("--only", "^bench/duo$")
        done = self.results("--root", self.project)
        self.assertEqual(done.returncode, 0, done.stderr)
        kept = json.loads((self.project / "bench/results/gpu_nvidia_h100_80gb_hbm3_attention.json").read_text())
        self.assertEqual(len(kept["benchmarks"]), len(json.loads(text)["benchmarks"]) - 1)

    def test_what_is_no_run_is_refused(self):
        self.assertIn("parts.tsv cannot be read", self.results().stderr)
        (self.path / "nvidia-smi").unlink()
        self.run_kit()
        self.assertIn("the run found no GPU", self.results("--root", self.project).stderr)
        self.gpu()
        for parts in ("", "a\tb\n", "tests/a\tperfect\t3\t\n", "tests/a\tok\tlong\t\n"):
            (self.out / "parts.tsv").write_text(parts)
            self.assertIn("parts.tsv", self.results("--root", self.project).stderr)
        (self.out / "parts.tsv").write_text("tests/a\tok\t3\t\n")
        for damage in (b"", b"no archive", (self.out / "results.tgz").read_bytes()[:40]):
            (self.out / "results.tgz").write_bytes(damage)
            refused = self.results("--root", self.project)
            self.assertIn("results.tgz cannot be read", refused.stderr)
            self.assertNotIn("Traceback", refused.stderr)
        for text in ("[]", "{}", '{"context": {}, "benchmarks": []}', '{"context": 3, "benchmarks": 4}', "\0"):
            (self.out.parent / "attention.duo.json").write_text(text)
            with tarfile.open(self.out / "results.tgz", "w:gz") as packed:
                packed.add(self.out.parent / "attention.duo.json", arcname="../../attention.duo.json")
            refused = self.results("--root", self.project)
            self.assertNotEqual(refused.returncode, 0, text)
            self.assertNotIn("Traceback", refused.stderr, text)


if __name__ == "__main__":
    unittest.main()
