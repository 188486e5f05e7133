# SPDX-License-Identifier: Apache-2.0
"""What the scripts of bench/shards compute, against sums by hand."""
import math
import pathlib
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "bench" / "shards")]

import imbalance  # noqa: E402
import measured  # noqa: E402
from pages import distributed_page  # noqa: E402


def main():
    # Two ranks, three stretches: 4 + 5 + 3 of the slower ones, and 2 of messages.
    assert measured.composed([[4, 1, 3], [2, 5, 3]], 2) == 14
    assert measured.composed([[1.5]], 0) == 1.5

    alone = {"ranks": 2, "cases": [{"plan": "duo", "division": "balanced", "sums": 8, "gathers": 3,
                                    "segments": [[1.0, 2.0], [3.0, 1.0]]}]}
    together = {"sum": {"median": 0.5}, "gather": {"median": 0.25},
                "cases": [{"plan": "duo", "division": "balanced", "median": 10, "p10": 9, "p90": 12}]}
    case, = measured.cases_of(alone, together)
    assert case["predicted"] == {"parts": 5.0, "messages": 8 * 0.5 + 3 * 0.25}
    assert case["measured"] == {"median": 10, "p10": 9, "p90": 12}
    together["cases"][0]["plan"] = "full"
    try:
        list(measured.cases_of(alone, together))
        raise AssertionError("runs of other cases are compared")
    except SystemExit as why:
        assert "other cases" in str(why)

    # The second layer is worst; a layer that costs nothing has no ratio.
    found = {"layers": [{"slowest": 6, "mean": 5}, {"slowest": 3, "mean": 2}, {"slowest": 0, "mean": 0}]}
    assert math.isclose(imbalance.worst_layer(found), 1.5)

    assert distributed_page.span(0.012, 0.0154, 1e3) == "12.0 to 15.4"
    assert distributed_page.span(0.0154, 0.012, 1e3) == "12.0 to 15.4"
    assert distributed_page.span(0.01201, 0.01202, 1e3) == "12.0"
    assert distributed_page.span(0.98, 1.2, 1e3) == "980 to 1,200"
    cases = [{"ranks": 4, "node": 4}, {"ranks": 16, "node": 8}, {"ranks": 16, "node": 16}]
    assert distributed_page.in_nodes(cases) == cases[:2]


if __name__ == "__main__":
    main()
