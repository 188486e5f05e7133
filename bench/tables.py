#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes the tables of measurements into the pages, between <!-- name --> and <!-- /name -->, from their JSON
in bench/results. Text outside the markers is left alone.

  bench/tables.py                          all pages
  bench/tables.py --page docs/results.md   one of them
  bench/tables.py --check                  writes nothing; shows what differs, and fails if anything does

A page is a line in PAGES and a module in bench/pages with its tables: a name, the files it is made from,
and a function that takes their paths and returns Markdown. A name with a `*` stands for all files that fit it,
or none.
"""
import argparse
import difflib
import re
import sys
from pathlib import Path

from pages import adoption_page, contributing_page, distributed_page, install_page, low_bits_page, not_yet_measured_page, performance_page, readme_page, real_results_page, results_page, serving_page, triforce_page

ROOT = Path(__file__).resolve().parent.parent
PAGES = {"README.md": readme_page.TABLES, "CONTRIBUTING.md": contributing_page.TABLES, "docs/adoption.md": adoption_page.TABLES,
         "docs/distributed.md": distributed_page.TABLES, "docs/install.md": install_page.TABLES, "docs/not_yet_measured.md": not_yet_measured_page.TABLES,
         "docs/performance.md": performance_page.TABLES,
         "docs/results.md": {**real_results_page.TABLES, **low_bits_page.TABLES, **results_page.TABLES},
         "docs/serving.md": serving_page.TABLES, "docs/triforce.md": triforce_page.TABLES}
MARKER = re.compile(r"^<!-- /([a-z0-9_]+) -->$", re.MULTILINE)


def filled(name, text, tables, results, complete):
    """The page's text with its tables made again. A table whose files do not exist stays as it is, unless all of them
    have to be `complete`."""
    without_table = set(MARKER.findall(text)) - set(tables)
    if without_table:
        sys.exit(f"{name}: no table is called {', '.join(sorted(without_table))}")
    for table, (files, make) in tables.items():
        pattern = re.compile(rf"(^<!-- {table} -->\n).*?(^<!-- /{table} -->$)", re.DOTALL | re.MULTILINE)
        if len(pattern.findall(text)) != 1:
            sys.exit(f"{name} must have <!-- {table} --> and <!-- /{table} --> once, on lines of their own")
        paths = [path for file in files
                 for path in (sorted(results.glob(file)) if "*" in file else [results / file])]
        missing = [path for path in paths if not path.exists()]
        if missing and complete:
            sys.exit(f"{name}: the table {table} is made from {missing[0]}, which is not there")
        if missing:
            print(f"{name}: the table {table} stays as it is, for there is no {missing[0]}", file=sys.stderr)
            continue
        made = make(*paths)
        text = pattern.sub(lambda found, made=made: f"{found[1]}{made}\n{found[2]}", text)
    return text


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--results", type=Path, default=ROOT / "bench" / "results", help="where the JSON lies")
    parser.add_argument("--root", type=Path, default=ROOT, help="where the pages lie")
    parser.add_argument("--page", choices=PAGES, help="only this one")
    parser.add_argument("--out", type=Path, help="write --page there instead of over it")
    parser.add_argument("--check", action="store_true", help="compare instead of writing")
    arguments = parser.parse_args()
    if arguments.out and not arguments.page:
        parser.error("--out takes one page: name it by --page")
    differs = False
    for name in [arguments.page] if arguments.page else PAGES:
        before = (arguments.root / name).read_text(encoding="utf-8")
        after = filled(name, before, PAGES[name], arguments.results, arguments.check)
        if not arguments.check:
            (arguments.out or arguments.root / name).write_text(after, encoding="utf-8")
        elif before != after:
            differs = True
            sys.stdout.writelines(difflib.unified_diff(before.splitlines(True), after.splitlines(True),
                                                       name, f"{name}, made from the JSON", n=0))
    if differs:
        sys.exit("Pages differ from their JSON; bench/tables.py makes them again")


if __name__ == "__main__":
    main()
