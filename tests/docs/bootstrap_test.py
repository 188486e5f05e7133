# SPDX-License-Identifier: Apache-2.0
"""bench/bootstrap.py against cases whose intervals are known."""
import math
import random
import sys
import unittest
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "bench"))
from bootstrap import difference, grouped, interval, ratio, shown, texts_of_points  # noqa: E402


class Bootstrap(unittest.TestCase):
    def test_equal_texts_leave_no_doubt(self):
        self.assertEqual(interval([[1, 0]] * 30), (0.5, 0.5, 0.5))

    def test_binomial(self):
        # 100 texts of one question, 80 right: the standard error is 0.04.
        mean, low, high = interval([[1]] * 80 + [[0]] * 20)
        self.assertAlmostEqual(mean, 0.8)
        self.assertAlmostEqual(low, 0.8 - 1.96 * 0.04, delta=0.011)
        self.assertAlmostEqual(high, 0.8 + 1.96 * 0.04, delta=0.011)

    def test_questions_of_one_text_count_once(self):
        # Ten questions that are right or wrong together tell as much as one.
        one = interval([[1]] * 20 + [[0]] * 20)
        ten = interval([[1] * 10] * 20 + [[0] * 10] * 20)
        self.assertEqual(one, ten)
        spread = interval([[1] * 5 + [0] * 5] * 40)
        self.assertEqual(spread[1:], (0.5, 0.5))

    def test_texts_of_many_questions_weigh_more(self):
        self.assertAlmostEqual(interval([[1, 1, 1], [0]])[0], 0.75)

    def test_coverage(self):
        drawing = random.Random(5)
        inside = 0
        for _ in range(200):
            texts = [[float(drawing.random() < 0.7)] for _ in range(40)]
            _, low, high = interval(texts, draws=400)
            inside += low <= 0.7 <= high
        self.assertGreater(inside, 170)
        self.assertLess(inside, 200)

    def test_paired_difference_is_narrower(self):
        ours = [[float(i % 2)] for i in range(40)]
        theirs = [[0.0] if i < 4 else text for i, text in enumerate(ours)]
        mean, low, high = difference(ours, theirs)
        self.assertAlmostEqual(mean, 0.05)
        self.assertGreaterEqual(low, 0)
        self.assertLess(high - low, 0.15)
        with self.assertRaises(ValueError):
            difference(ours, theirs[1:])

    def test_paired_ratio(self):
        # Texts differ a lot, and the one plan has half of the other's value on each: the ratio is beyond doubt.
        theirs = [float(1 + i % 7) for i in range(40)]
        self.assertEqual(ratio([value / 2 for value in theirs], theirs), (0.5, 0.5, 0.5))
        whole, low, high = ratio([value / 2 + i % 2 for i, value in enumerate(theirs)], theirs)
        self.assertAlmostEqual(whole, 0.5 + 20 / sum(theirs))
        self.assertTrue(0.5 < low < whole < high < 0.75)
        self.assertTrue(math.isnan(ratio([1.0], [2.0])[1]))
        with self.assertRaises(ValueError):
            ratio(theirs, theirs[1:])

    def test_confidence_widens(self):
        texts = [[1]] * 20 + [[0]] * 20
        narrow, wide = interval(texts, confidence=0.5), interval(texts, confidence=0.99)
        self.assertLess(wide[1], narrow[1])
        self.assertGreater(wide[2], narrow[2])

    def test_few_texts(self):
        self.assertTrue(all(math.isnan(value) for value in interval([])))
        self.assertTrue(math.isnan(interval([[1, 0]])[1]))
        self.assertEqual(shown(interval([[1, 0]])), "50.0")

    def test_points(self):
        points = [{"marks": "110", "questions_per_text": [2, 1]}, {"marks": "o1"}]
        self.assertEqual(texts_of_points(points), [[1, 1], [0], [0], [1]])
        found = [{"found": [0.5, 1.0], "questions_per_text": [2]}]
        self.assertEqual(texts_of_points(found, lambda point: point["found"]), [[0.5, 1.0]])
        with self.assertRaises(ValueError):
            grouped([1, 2, 3], [2])
        self.assertEqual(shown((0.84, 0.765, 0.902)), "84.0 (76.5 to 90.2)")


if __name__ == "__main__":
    unittest.main()
