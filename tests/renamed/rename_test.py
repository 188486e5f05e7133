#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""scripts/rename-from-0.1: programs of version 0.1 (from_0.1: the README's, the fragments of docs/adoption.md and the
examples that need the library alone) compile after it, and none that had an old name before it; what is not ours stays.

  rename_test.py --cxx COMPILER --include FOLDER...
"""
import argparse
import concurrent.futures
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

HERE = pathlib.Path(__file__).resolve().parent
ROOT = HERE.parent.parent
SCRIPT = ROOT / "scripts" / "rename-from-0.1"
OPTIONS = None


def run(*arguments):
    return subprocess.run([sys.executable, SCRIPT, *map(str, arguments)], capture_output=True, text=True, check=True).stdout


class Folder(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = pathlib.Path(folder.name)

    def renamed(self, text, name="file.cpp"):
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        self.said = run(self.folder)
        return path.read_text(encoding="utf-8")


class Programs(Folder):
    def compiles(self, path):
        done = subprocess.run([OPTIONS.cxx, "-std=c++20", "-fsyntax-only", "-w", *([] if "clang" in OPTIONS.cxx else ["-fmax-errors=1"]), *(f"-I{folder}" for folder in OPTIONS.include), "-x", "c++", str(path)],
                              capture_output=True, text=True, check=False)
        return done.returncode == 0, done.stderr

    def test_compile_once_they_are_renamed(self):
        before, after = self.folder / "before", self.folder / "after"
        shutil.copytree(HERE / "from_0.1", before)
        shutil.copytree(before, after)
        said = json.loads(run(after, "--json"))
        self.assertEqual(said["left"], [])
        changed = {pathlib.Path(one["file"]).name for one in said["changed"]}
        sources = {"quickstart_cuda.cu", "adoption_cuda.cpp", "adoption_engine.cpp", "adoption_format.cpp"}
        self.assertEqual(changed, sources | {"custom_policy.hpp"})
        sources.add("custom_policy.cpp")  # which includes that
        paths = [path for path in sorted(after.iterdir()) if path.suffix != ".hpp"] + [before / name for name in sorted(sources)]
        with concurrent.futures.ThreadPoolExecutor(2) as threads:
            for path, (compiled, errors) in zip(paths, threads.map(self.compiles, paths)):
                with self.subTest(file=f"{path.parent.name}/{path.name}"):
                    self.assertEqual(compiled, path.parent == after, errors[:3000])


class Names(Folder):
    def test_qualified(self):
        self.assertEqual(self.renamed("kvpolicy::cuda::KvCache<kvpolicy::half> c{::kvpolicy::cuda::default_memory()};\n"),
                         "kvpolicy::gpu::KvCache<kvpolicy::float16> c{::kvpolicy::gpu::default_memory()};\n")

    def test_after_a_using_directive(self):
        self.assertEqual(self.renamed("using namespace kvpolicy;\ncuda::KvCache<half>* c; std::vector<half> v(3, half{1}); half* p = v.data();\n"
                                      "const half& first = *p; f(sizeof(half)); auto n = static_cast<half>(2.0F); half h;\n"),
                         "using namespace kvpolicy;\ngpu::KvCache<float16>* c; std::vector<float16> v(3, float16{1}); float16* p = v.data();\n"
                         "const float16& first = *p; f(sizeof(float16)); auto n = static_cast<float16>(2.0F); float16 h;\n")

    def test_a_policys_commit(self):
        self.assertEqual(self.renamed("struct P {\n  void commit(const kvpolicy::Segment& rows) { use(rows); }\n  void commit(const ::other::Segment& rows);\n"
                                      "  void commit(const kvpolicy::Segment&) noexcept;\n  void commit();\n};\n"),
                         "struct P {\n  void commit(const kvpolicy::Segment& rows) noexcept { use(rows); }\n  void commit(const ::other::Segment& rows);\n"
                         "  void commit(const kvpolicy::Segment&) noexcept;\n  void commit();\n};\n")
        self.assertEqual(self.renamed("using namespace kvpolicy;\nvoid commit(const Segment&);\n"), "using namespace kvpolicy;\nvoid commit(const Segment&) noexcept;\n")
        self.assertEqual(self.renamed("void commit(const Segment& rows);\n"), "void commit(const Segment& rows);\n")
        self.assertEqual(self.renamed("template <class E>\nvoid Own<E>::commit(const ::kvpolicy::Segment& rows) {}\nvoid Other::commit(kvpolicy::Segment const& rows) {}\n"),
                         "template <class E>\nvoid Own<E>::commit(const ::kvpolicy::Segment& rows) noexcept {}\nvoid Other::commit(kvpolicy::Segment const& rows) noexcept {}\n")
        self.assertEqual(self.renamed("void f() { Own::commit(kvpolicy::Segment{}); }\n"), "void f() { Own::commit(kvpolicy::Segment{}); }\n")

    def test_inside_the_namespace(self):
        self.assertEqual(self.renamed("namespace kvpolicy::cuda {\nstruct A { half x; };\n}\nnamespace kvpolicy {\nstruct half;\nnamespace cuda {\n}\n}\n"),
                         "namespace kvpolicy::gpu {\nstruct A { float16 x; };\n}\nnamespace kvpolicy {\nstruct float16;\nnamespace gpu {\n}\n}\n")

    def test_cudas_half_after_a_directive_for_our_cuda_alone(self):
        self.assertEqual(self.renamed("using namespace kvpolicy::cuda;\nKvCache<kvpolicy::half>* c; half* of_cuda;\n"),
                         "using namespace kvpolicy::gpu;\nKvCache<kvpolicy::float16>* c; half* of_cuda;\n")

    def test_aliases_and_declarations(self):
        self.assertEqual(self.renamed("namespace kv = kvpolicy;\nnamespace cuda = kvpolicy::cuda;\nusing kvpolicy::half;\n"
                                      "kv::cuda::Batch<kv::half>* b; cuda::Batch<half>* c; using E = half;\n"),
                         "namespace kv = kvpolicy;\nnamespace gpu = kvpolicy::gpu;\nusing kvpolicy::float16;\n"
                         "kv::gpu::Batch<kv::float16>* b; gpu::Batch<float16>* c; using E = float16;\n")

    def test_what_our_macros_take(self):
        self.assertEqual(self.renamed("KVPOLICY_DEFINE_INSTANCES(half)\n"), "KVPOLICY_DEFINE_INSTANCES(float16)\n")

    def test_code_in_comments(self):
        self.assertEqual(self.renamed("// a cuda::KvCache over HeadPlan<half>; half of kvpolicy::cuda is cuda's\nusing namespace kvpolicy;\n"),
                         "// a gpu::KvCache over HeadPlan<float16>; half of kvpolicy::gpu is cuda's\nusing namespace kvpolicy;\n")

    def test_what_is_not_ours_stays(self):
        for text in ("half x = __float2half(1.0F); cuda::std::array<half, 2> a; ::cuda::barrier<> b;\n",  # no word of kvpolicy
                     "using namespace kvpolicy;\n::cuda::std::span<int> s; thrust::cuda::par.on(0); cuda::std::array<int, 2> a;\n",
                     "using namespace kvpolicy;\n::half x; mine::half y; int half = 3; use(half, half / 2); a.half(); b[half] = half + 1;\n",
                     "using namespace other::kvpolicy;\ncuda::barrier<> b; half h;\n",
                     "using namespace kvpolicy;\nfor (int half = 0; half < 2; ++half) f(half);\nvoid g(std::size_t half, float* out);\n",
                     "using namespace kvpolicy;\nconst char* a = \"half of kvpolicy::cuda\"; auto b = R\"(cuda::Engine<half>)\"; char c = '\\'';\n",
                     "using namespace kvpolicy;\n// The other half is cuda.\n/* half */ #include <kvpolicy/cuda.hpp>\n"):
            with self.subTest(text=text):
                path = self.folder / "file.cpp"
                path.write_text(text, encoding="utf-8")
                run(self.folder)
                # Only places that only a reader can tell are printed.
                self.assertEqual(path.read_text(encoding="utf-8"), text)

    def test_a_place_that_cannot_be_told_is_printed(self):
        text = "using namespace kvpolicy;\nint half = 1;\nf(half);\nstd::vector<half> v;\n"
        self.assertEqual(self.renamed(text), text.replace("<half>", "<float16>"))
        self.assertIn("file.cpp:3: left as it is; is `half` kvpolicy's here?", self.said)

    def test_twice_is_once(self):
        once = self.renamed("using namespace kvpolicy;\ncuda::Engine<half>* e;\n")
        self.assertEqual(self.renamed(once), once)
        self.assertIn("0 files changed", self.said)


class Page(unittest.TestCase):
    def test_has_the_names_that_the_script_changes(self):
        self.assertIn("\n" + run("--table") + "\n", (ROOT / "docs" / "renamed.md").read_text(encoding="utf-8"))


class Files(Folder):
    def test_a_dry_run_changes_nothing(self):
        path = self.folder / "a.cu"
        path.write_text("kvpolicy::half x;\n", encoding="utf-8")
        said = run(self.folder, "--dry-run")
        self.assertIn("-kvpolicy::half x;\n+kvpolicy::float16 x;\n", said)
        self.assertEqual(path.read_text(encoding="utf-8"), "kvpolicy::half x;\n")

    def test_other_files_stay_and_bytes_are_kept(self):
        (self.folder / "notes.txt").write_text("kvpolicy::half\n", encoding="utf-8")
        (self.folder / "latin.cpp").write_bytes(b"// \xe9 kvpolicy::half\n")
        (self.folder / "dos.cpp").write_bytes("kvpolicy::half x;\r\n// \u00e9\r\n".encode())
        said = run(self.folder)
        self.assertEqual((self.folder / "notes.txt").read_text(encoding="utf-8"), "kvpolicy::half\n")
        self.assertEqual((self.folder / "latin.cpp").read_bytes(), b"// \xe9 kvpolicy::half\n")
        self.assertEqual((self.folder / "dos.cpp").read_bytes(), "kvpolicy::float16 x;\r\n// \u00e9\r\n".encode())
        self.assertIn("latin.cpp: left as it is, not UTF-8 at byte 3", said)

    def test_a_folder_that_is_not_there(self):
        done = subprocess.run([sys.executable, SCRIPT, str(self.folder / "no")], capture_output=True, text=True, check=False)
        self.assertEqual(done.returncode, 1)
        self.assertIn("is not there; name the folder of your sources", done.stderr)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cxx", required=True)
    parser.add_argument("--include", action="append", default=[])
    OPTIONS, rest = parser.parse_known_args()
    unittest.main(argv=[sys.argv[0], *rest])
