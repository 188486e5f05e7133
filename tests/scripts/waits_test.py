# SPDX-License-Identifier: Apache-2.0
"""Tests wait for events. Here stand the few places where one waits for time, or something is done by the clock, and why
it cannot fail on a machine that has other things to do."""
import re
import unittest
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WAITS = re.compile(
    r"sleep_for|sleep_until|usleep|nanosleep|\bsleep [\d.\"$]+|time\.(?:sleep|monotonic|perf_counter|time)\(|(?<!self)\.wait\([\d.]+\)"
    r"|wait_(?:for|until)\(lock|(?:steady|system|high_resolution)_clock|--(?:rank-timeout|seconds-to-\w+|save-every)\b|\bPATIENCE = ")
REASONS = {
    ("tests/long/record.hpp", "steady_clock"): "how long a run took, which nobody judges",
    ("tests/tokenizer/compare.py", "time.time("): "how long a comparison took, which nobody judges",
    ("tests/simt/runtime_streams.hpp", "steady_clock"): "the emulated device's events, whose times nobody judges",
    ("tests/nccl/nccl_communicator_test.cpp", "steady_clock"): "the type of a time that the test itself lets run",
    ("tests/serve/served.py", "PATIENCE = "): "after which a test that hangs fails: longer than any machine needs",
    ("tests/serve/test_limits.py", ".wait(0.2)"): "how fast a body trickles; at any pace it is too slow",
    ("tests/serve/test_limits.py", "--seconds-to-write"): "how long a client that takes nothing is waited for: it takes nothing for ever",
    ("tests/serve/test_limits.py", "--seconds-to-read"): "how long a body is waited for: it never ends",
    ("tests/serve/test_restarts.py", "--save-every"): "the interval; that something was saved is then an event",
    ("tests/serve/test_ranks.py", "time.sleep("): "longer than rank 0 may be silent; that it is silent for longer changes nothing",
    ("tests/serve/test_ranks.py", "--rank-timeout"): "after which a rank that stands still is given up; all others answer within it or the test says so",
}


class Waits(unittest.TestCase):
    def test_only_these(self):
        found = set()
        for path in sorted((ROOT / "tests").rglob("*")):
            name = str(path.relative_to(ROOT))
            if path.suffix in (".cpp", ".hpp", ".cu", ".c", ".py", ".sh", ".cmake") and path != Path(__file__).resolve():
                found |= {(name, one) for one in WAITS.findall(path.read_text(encoding="utf-8"))}
        self.assertEqual(found - set(REASONS), set(), "these wait for time: let them wait for an event")
        self.assertEqual(set(REASONS) - found, set(), "these are no more")


if __name__ == "__main__":
    unittest.main()
