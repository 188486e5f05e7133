#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""What the tables on a real model are made of: which tasks count, what is called tuned, which column a plan stands in, and
that a plan is compared with the full cache text by text."""
import json
import math
import sys
import tempfile
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
import answered_tasks  # noqa: E402
import head_agreement  # noqa: E402
import results  # noqa: E402
from pages import real_results_page as page  # noqa: E402


def point(plan, marks, method=None, suite="niah_single_2", seed=1, **more):
    return {"suite": suite, "tokens": 2048, "seed": seed, "plan": plan, "method": method or plan, "marks": marks,
            "questions_per_text": [1] * len(marks), "row_bytes": 100, "kv_bytes": 100, **more}


class RealResults(unittest.TestCase):
    def test_tasks_that_the_full_cache_answers_to_a_half_count(self):
        points = [point("full", "10", suite="vt"), point("full", "100", suite="cwe"), point("full", "1", suite="cwe", seed=2),
                  point("full", "00", suite="fwe"), point("int8", "11", suite="fwe")]
        self.assertEqual(answered_tasks.answered(points), {"vt": 0.5, "cwe": (1 / 3 + 1) / 2})
        self.assertEqual(answered_tasks.answered([]), {})

    def test_a_chosen_setting_is_called_tuned_and_a_published_one_is_not(self):
        for plan, method, name in [("snapkv:512", "snapkv", "SnapKV"),
                                   ("adakv:512,kernel=29", "adakv:kernel=29", "Ada-KV, tuned (kernel 29)"),
                                   ("headkv+int4:512,kernel=3,beta=2", "headkv+int4:kernel=3,beta=2",
                                    "HeadKV + int4, tuned (kernel 3, beta 2)"),
                                   ("headkv@a/enhanced_heads.json:64,beta=2", "headkv@a/enhanced_heads.json:beta=2",
                                    "HeadKV-ER (enhanced), tuned (beta 2)"),
                                   ("kivi2:32,flush=steady", "kivi2:flush=steady", "kivi2, flush steady")]:
            self.assertEqual(page.label(point(plan, "1", method)), name)

    def test_plans_that_were_searched_are_called_by_what_they_may_read(self):
        self.assertEqual(page.reads_label({"plan": "bounded@build/reads/1_3.json:0.05"}), "searched for 1/3")
        self.assertEqual(page.reads_label({"plan": "bounded:0.05,residual=32"}), "`bounded:0.05,residual=32`")

    def test_the_table_of_reads_has_the_plans_that_read_most_first(self):
        def one(plan, read, kl):
            return {"suite": "agreement", "tokens": 2048, "seed": 1, "plan": plan, "row_bytes": 100, "text_kl": [kl, kl],
                    "text_bytes_read": [read, read], "text_same": [1.0, 0.5]}
        lines = page.reads.__wrapped__({"points": [one("full", 100, 0.0), one("int4", 30, 0.5),
                                       one("bounded@a/1_2.json:0.05", 50, 0.25)]}).splitlines()
        self.assertEqual([line.split("|")[1].strip() for line in lines[-3:]],
                         ["`full`", "searched for 1/2", "`int4`"])
        self.assertIn("50 %", lines[-2])
        self.assertIn("75.0", lines[-2])

    def test_a_plan_stands_in_the_smallest_column_that_it_fits(self):
        full = [point("full", "1", row_bytes=1000)]
        for rows, column in [(1000, 1), (560, 1), (500, 1 / 2), (260, 1 / 2), (250, 1 / 4), (126, 1 / 8), (31, 1 / 32), (1, 1 / 32)]:
            self.assertEqual(page.column_of(point("int4", "1", row_bytes=rows), full), column, rows)
        self.assertEqual(page.column_of(point("duo:0.7", "1", "duo", share=0.25, row_bytes=180), full), 1 / 4)

    def test_differences_pair_the_texts_of_equal_seeds(self):
        full = [point("full", "1100", seed=1), point("full", "0011", seed=2)]
        same = [point("int4", "0011", seed=2), point("int4", "1100", seed=1)]
        self.assertEqual(page.difference(same, full), (0, 0, 0))
        mean, low, high = page.difference([point("int4", "1000", seed=1)], full)
        self.assertEqual(mean, -0.25)
        self.assertLessEqual(low, mean)
        self.assertLessEqual(mean, high)
        self.assertEqual(page.points_more((-0.25, -0.75, 0.0)), "-25 (-75 to +0)")
        self.assertEqual(page.percent((math.nan,) * 3), "")

    def test_questions_and_texts_are_counted_over_seeds_and_tasks(self):
        points = [point("full", "1100", seed=seed, suite=suite) | {"questions_per_text": [2, 2]} for seed in (1, 2) for suite in "ab"]
        self.assertEqual(page.asked(points), "16 questions on 8 texts")

    def test_shares_that_were_measured_apart_stand_in_one_table(self):
        def run(*shares):
            return {"points": [point("full", "1111")] + [
                point(f"h2o:{1000 * share:g}", "1100" if share == 1 / 4 else "1000", "h2o", share=share) for share in shares]}
        lines = page.unasked.__wrapped__(run(1 / 4), run(1 / 2, 1 / 8)).splitlines()
        self.assertTrue(lines[0].startswith("4 questions"), lines[0])
        self.assertEqual(lines[-3], "| method | 1/2 | 1/4 | 1/8 |")
        self.assertEqual([cell.split("(")[0].strip() for cell in lines[-1].split("|")[1:-1]], ["H2O", "25", "50", "25"])

    def test_random_gates_come_last(self):
        def gates(name):
            return point(f"duo@build/{name}:0.5", "1", f"duo@build/{name}")
        found = results.by_gates([gates("random-0"), gates("razor"), gates("random-1"), gates("kvzip")])
        self.assertEqual([*found], ["RazorAttention", "KVzip's gates", "random-0", "random-1"])

    def test_a_table_without_measurements_says_how_to_make_them(self):
        for files, make in page.TABLES.values():
            self.assertTrue(all(file.startswith("smollm2/") and "*" in file for file in files))
            self.assertTrue(make().startswith("Not yet measured: "))

    def test_rows_that_heads_read_are_told_by_kind(self):
        gates = [0.9, 0.1, 0.8, 0.2]
        self.assertEqual([*page.kinds_of_heads(gates).values()], [[0, 2], [1, 3], [0, 1, 2, 3]])
        run = {"gates": gates, "settings": {"texts": 3}, "points": [
            {"length": length, "epsilon": 0.05, "rows_read": [[large, small], [large + 0.02, small + 0.02]]}
            for length, large, small in ((1024, 0.8, 0.4), (2048, 0.6, 0.2))]}
        lines = page.rows_by_head.__wrapped__(run).splitlines()
        halves = [line for line in lines if "half with" in line]
        self.assertEqual([[cell.strip().split(" ")[0] for cell in line.split("|")[3:5]] for line in halves], [["81", "61"], ["41", "21"]])
        self.assertIn("3 texts", lines[0])

    def test_methods_of_others_stand_by_what_they_answer(self):
        def one(plan, ratio, marks, held):
            return {"suite": "niah_depths", "tokens": 2048, "seed": 1, "plan": plan, "ratio": ratio, "marks": marks,
                    "questions_per_text": [2, 2], "kv_bytes": held}
        points = [one("full", 1, "1111", 100), one("keydiff", 4, "0001", 25), one("keydiff", 8, "0000", 12),
                  one("kvzip", 4, "1101", 110), one("kvzip", 8, "1100", 115)]
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "unasked_theirs.json"
            file.write_text(json.dumps({"points": points}), encoding="utf-8")
            lines = page.unasked_theirs(file).splitlines()
        self.assertIn("4 questions on 2 texts", lines[0])
        self.assertEqual([line.split("|")[1].strip() for line in lines[-2:]], ["KVzip", "KeyDiff"])
        self.assertIn("110 % and 115 %", lines[-2])
        self.assertIn("25 % and 12 %", lines[-1])

    def test_agreement_of_rankings(self):
        found = head_agreement.agreement(["a", "b"], [[1, 2, 3, 4], [4, 3, 2, 1]], 0.5)
        self.assertEqual(found["correlation"], [[1, -1], [-1, 1]])
        self.assertEqual((found["common"], found["kept"], found["heads"]), ([[1, 0], [0, 1]], 2, 4))


if __name__ == "__main__":
    unittest.main()
