#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Doxygen's filter for headers: the first comment of a file, which says what it is and for whom, is
plain `//`; here it becomes the documentation of the file. Line numbers stay as they are.

  docs/site/header_filter.py include/kvpolicy/duo.hpp
"""
import sys


def main():
    with open(sys.argv[1], encoding="utf-8") as file:
        lines = file.read().split("\n")
    end = next(i for i, line in enumerate(lines) if not line.startswith("//"))
    # "// SPDX", "//", then the text: the first two become the command that says whose text it is.
    if end > 2 and lines[1] == "//":
        lines[0], lines[1] = "///", "/// @file"
        for i in range(2, end):
            lines[i] = "/" + lines[i]
    sys.stdout.write("\n".join(lines))


if __name__ == "__main__":
    main()
