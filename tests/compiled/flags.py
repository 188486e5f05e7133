# SPDX-License-Identifier: Apache-2.0
"""Finds vector instructions beyond the baseline in functions that other files of a program share.

  flags.py libkvpolicy_compiled.a

The linker keeps one copy of an inline function, whichever file it comes from. So an instruction that not
every x86-64 has (these begin with v) is only allowed in a function of one instruction set, whose name has
Highway's namespace in it. Exits with 1 and names all other functions that have one. Needs objdump.
"""
import re
import subprocess
import sys


def main():
    listing = subprocess.run(["objdump", "-d", "--no-show-raw-insn", sys.argv[1]], check=True,
                             capture_output=True, text=True).stdout
    function, own, wrong = "", 0, set()
    for line in listing.splitlines():
        if begin := re.match(r"[0-9a-f]+ <(.*)>:$", line):
            function = begin[1]
        elif re.match(r"\s*[0-9a-f]+:\tv\w+ .*%[xyz]mm", line):
            if re.search(r"N_(SSE4|AVX2|AVX3|SCALAR|EMU128|SSSE3|SSE2)", function):
                own += 1
            else:
                wrong.add(function)
    print(f"{own} instructions beyond the baseline in functions of an instruction set, "
          f"{len(wrong)} functions that should have none")
    for name in sorted(wrong):
        print("  " + name)
    return 0 if own > 0 and not wrong else 1


if __name__ == "__main__":
    sys.exit(main())
