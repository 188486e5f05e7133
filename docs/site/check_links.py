#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Checks that every link and picture of the built site that stays in it leads somewhere (to which place
of a page, only for links on the pages that we wrote: Doxygen's own lists name members that it hides),
and puts the repository's files beside it that pages lead to (page_filter.py).

  docs/site/check_links.py build/docs/html
"""
import html
import os
import re
import shutil
import sys
from urllib.parse import unquote

ROOT = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
TARGET = re.compile(r'(?:href|src)="([^"]+)"')
ANCHOR = re.compile(r'\b(?:id|name)="([^"]+)"')


def main():
    site = sys.argv[1]
    pages = {}
    for name in os.listdir(site):
        if name.endswith(".html"):
            with open(os.path.join(site, name), encoding="utf-8") as file:
                pages[name] = file.read()
    anchors = {name: set(map(html.unescape, ANCHOR.findall(text))) for name, text in pages.items()}
    links, broken = 0, []
    for name, text in sorted(pages.items()):
        ours = name == "index.html" or name.startswith("page_")
        for target in sorted(set(map(html.unescape, TARGET.findall(text)))):
            if re.match(r"[a-z]+:|//", target):
                continue
            links += 1
            path, _, anchor = unquote(target).partition("#")
            path = path or name
            if path.startswith("files/") and os.path.isfile(os.path.join(ROOT, path[6:])):
                copy = os.path.join(site, path)
                os.makedirs(os.path.dirname(copy), exist_ok=True)
                shutil.copyfile(os.path.join(ROOT, path[6:]), copy)
            if not os.path.exists(os.path.join(site, path)):
                broken.append(f"{name}: {target} is not there")
            elif ours and anchor and path in anchors and anchor not in anchors[path]:
                broken.append(f"{name}: {target}: the page has no such place")
    for line in broken:
        print(line)
    if broken or links == 0:
        sys.exit(f"{len(broken)} of {links} links lead nowhere")
    print(f"{len(pages)} pages, {links} links, all lead somewhere")


if __name__ == "__main__":
    main()
