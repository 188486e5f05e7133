#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Prints the setting of a method that was best on the validation split, in the form that a plan's name has:
"kernel=29,beta=2".

  bench/choose_setting.py bench/results/settings.json headkv
"""
import argparse
import sys
from pathlib import Path

import results


def main():
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="what evaluate --split validation has written")
    parser.add_argument("method")
    arguments = parser.parse_args()
    chosen = results.chosen_setting(results.load(arguments.file), arguments.method)
    if not chosen:
        sys.exit(f"{arguments.file} has no settings of {arguments.method}: "
                 "./scripts/reproduce --only settings measures them")
    print(chosen)


if __name__ == "__main__":
    main()
