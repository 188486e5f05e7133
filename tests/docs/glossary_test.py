# SPDX-License-Identifier: Apache-2.0
"""Looks for the words that docs/glossary.md says are not used, in headers, kernels and pages.

The last column of the glossary's last table has the regular expressions. First the test checks itself: each
expression must be found in a text that has what the table's first column names.
"""
import pathlib
import re
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
# Made from the headers, and the list of the words itself.
EXCEPT = {"docs/api.md", "docs/glossary.md"}
# Each line breaks one row of the table.
BROKEN = """\
The pages behind it are free.
Chooses chunks anew.
Rows are quantised by and by.
by turning the query instead of the keys
void near_page(int); void far_pages(int);
once a page has settled
struct Place {};
StagePlace a; PagePlaces b; RowPlace c; TilePlace d; ChunkPlace e;
lay_line(heads);
bool told_ = false; void note_told_to_compress();
std::size_t alone_ = 0; rows_alone(head); evicted_alone();
QueryWindow window;
The query window holds them.
chunk_segment(0); commit_chunk(1);
  /// Of them, bytes in slow memory.
"""


def banned():
    """[(line of the table, expression)]"""
    text = (ROOT / "docs/glossary.md").read_text()
    table = text.split("| not | but | not to be found |", 1)[1]
    found = []
    for line in table.splitlines()[2:]:
        if not line.startswith("|"):
            break
        found += [(line, re.compile(e, re.MULTILINE)) for e in re.findall(r"`([^`]+)`", line.split("|")[3])]
    return found


def files():
    for folder, endings in (("include", {".hpp", ".h"}), ("kernels", {".cuh", ".cu"}), ("docs", {".md"})):
        yield from (p for p in sorted((ROOT / folder).rglob("*")) if p.suffix in endings)
    yield from (ROOT / name for name in ("README.md", "CONTRIBUTING.md"))


def main():
    expressions = banned()
    errors = [f"docs/glossary.md: the test's own text has nothing that '{e.pattern}' finds"
              for _, e in expressions if not e.search(BROKEN)]
    if len(expressions) < 10:
        errors.append(f"docs/glossary.md: only {len(expressions)} expressions were found in its last table")
    seen = 0
    for path in files():
        name = str(path.relative_to(ROOT))
        if name in EXCEPT:
            continue
        seen += 1
        text = path.read_text()
        for row, expression in expressions:
            for match in expression.finditer(text):
                line = text.count("\n", 0, match.start() + len(match.group()) - len(match.group().lstrip())) + 1
                instead = row.split("|")[2].strip()
                errors.append(f"{name}:{line}: '{match.group().strip()}' is not used; say {instead}")
    if seen < 200:
        errors.append(f"only {seen} files were looked at")
    print("\n".join(errors) or f"{seen} files, {len(expressions)} expressions: none found")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
