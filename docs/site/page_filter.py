#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Doxygen's filter for pages. They are written for whoever reads them in the repository; here their
links become links of the site:

- every heading gets a label, so that `#speculative-decoding` and `architecture.md#...` lead there;
- a link to another page leads to that page of the site;
- a link to any other file of the repository leads to a copy of it (scripts/docs puts it there);
- a link to a folder becomes plain text;
- a picture is named without its folder (IMAGE_PATH in the Doxyfile has them all).

Line numbers stay as they are.

  docs/site/page_filter.py docs/results.md
"""
import os
import re
import sys

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
LINK = re.compile(r"(?<!!)\[((?:[^\[\]]|\[[^\[\]]*\])*)\]\(([^()\s]+)\)")
PICTURE = re.compile(r"!\[([^\[\]]*)\]\(([^()\s:]+)\)")
CODE_SPAN = re.compile(r"(`+)(?:.|\n)*?\1")


def is_page(path):
    return path in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md") or (
        path.startswith("docs/") and path.endswith(".md"))


def label_of(path):
    """Of a page: its address in the site, too."""
    name = path.removeprefix("docs/").removesuffix(".md").lower().replace("/", "_")
    return "index" if name == "readme" else "page_" + name


def heading_label(path, heading):
    """The anchor that repository hosts give a heading, made unique by its page."""
    words = re.sub(r"[`*]|\[([^\]]*)\]\([^)]*\)", r"\1", heading).strip().lower()
    return label_of(path) + "-" + re.sub(r"[^\w\- ]", "", words).replace(" ", "-")


def link_of(page, text, target):
    if re.match(r"[a-z]+:", target):
        return None
    path, _, anchor = target.partition("#")
    path = os.path.relpath(os.path.join(os.path.dirname(page), path), ".") if path else page
    if is_page(path):
        return f"[{text}](@ref {label_of(path)}{'-' + anchor if anchor else ''})"
    if os.path.isdir(os.path.join(ROOT, path)):
        return text
    if not os.path.exists(os.path.join(ROOT, path)):
        sys.exit(f"{page}: the link to {target} leads nowhere")
    return f'<a href="files/{path}">{text}</a>'


def filtered(page, text):
    lines, labels, fenced, first = [], {}, False, True
    for line in text.split("\n"):
        if line.lstrip().startswith("```"):
            fenced = not fenced
        heading = None if fenced else re.match(r"(#+) (.*\S)\s*$", line)
        if heading and first:
            first = False
            if label_of(page) != "index":
                line = f"{line} {{#{label_of(page)}}}"
        elif heading:
            label = heading_label(page, heading.group(2))
            before = labels.setdefault(label, 0)
            labels[label] += 1
            line = f"{line} {{#{label}{f'-{before}' if before else ''}}}"
        lines.append(line)
    text = "\n".join(lines)

    # Links may go over the end of a line; code has none.
    blocks = re.split(r"(^```.*?^```$|^(?: {4}[^\n]*\n)+)", text, flags=re.M | re.S)
    for i in range(0, len(blocks), 2):
        spans = {}

        def hide(code):
            spans[f"\x00{len(spans)}\x00"] = code.group(0)
            return f"\x00{len(spans) - 1}\x00"

        def lead(link):
            return link_of(page, link.group(1), link.group(2)) or link.group(0)

        block = LINK.sub(lead, CODE_SPAN.sub(hide, blocks[i]))
        block = PICTURE.sub(lambda found: f"![{found.group(1)}]({os.path.basename(found.group(2))})", block)
        for mark, code in spans.items():
            block = block.replace(mark, code)
        blocks[i] = block
    return "".join(blocks)


def main():
    page = os.path.relpath(os.path.abspath(sys.argv[1]), ROOT)
    with open(sys.argv[1], encoding="utf-8") as file:
        sys.stdout.write(filtered(page, file.read()))


if __name__ == "__main__":
    main()
