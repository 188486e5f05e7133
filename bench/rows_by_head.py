#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Measures which share of its rows each KV head reads under a bound (`identify_heads shares --menu bound`), over the lengths
of texts and the bounds, and writes one JSON file: {"what", "command", "settings", "gates", "points": [{"length", "epsilon",
"rows_read": [layers][kv_heads]}]}. `gates` are DuoAttention's, by which readers may divide the heads into kinds.

  bench/rows_by_head.py --tool build/release/examples/identify_heads --model models/smollm2 --text novels \\
    --gates reference_model/weights/smollm2/duo --lengths 1024 2048 --epsilons 0.05 0.01 --texts 4 \\
    --folder build/reproduce/rows --out rows_by_head.json

What --folder has is not measured again, so a stopped run goes on where it was; once --out is written it is removed.
"""
import argparse
import json
import shlex
import shutil
import subprocess
import sys
from pathlib import Path

import head_agreement


def point(arguments, length, epsilon):
    """What the tool says, from --folder if it has said it there."""
    kept = arguments.folder / f"rows_{length}_{epsilon:g}.json"
    if not kept.exists():
        command = [arguments.tool, "shares", "--menu", "bound", "--model", arguments.model, "--text", arguments.text,
                   "--rows-read", f"{epsilon:g}", "--length", str(length), "--texts", str(arguments.texts), "--out",
                   str(kept.with_suffix("")), "--json"]
        done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
        if done.returncode:
            sys.exit(f"{shlex.join(command)} failed")
        unfinished = kept.with_suffix(".tmp")  # a stopped run leaves no half of a file
        unfinished.write_text(done.stdout, encoding="utf-8")
        unfinished.rename(kept)
    found = json.loads(kept.read_text(encoding="utf-8"))
    asked = {"model": Path(arguments.model).name, "text": arguments.text, "texts": arguments.texts, "length": length,
             "epsilon": epsilon}
    if any(found[name] != value for name, value in asked.items()):
        sys.exit(f"{kept} was measured with other settings: remove it, or give another --folder")
    return found


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tool", required=True, help="the program `identify_heads`")
    parser.add_argument("--model", required=True)
    parser.add_argument("--text", default="novels", help="as the tool names them")
    parser.add_argument("--gates", type=Path, required=True, help="a DuoAttention pattern of the model")
    parser.add_argument("--lengths", type=int, nargs="+", required=True, help="tokens")
    parser.add_argument("--epsilons", type=float, nargs="+", required=True, help="bounds")
    parser.add_argument("--texts", type=int, default=4, help="texts for each point")
    parser.add_argument("--folder", type=Path, required=True, help="for what the tool writes")
    parser.add_argument("--out", type=Path, required=True, help="the JSON file")
    arguments = parser.parse_args()
    arguments.folder.mkdir(parents=True, exist_ok=True)
    points = []
    for length in arguments.lengths:
        for epsilon in arguments.epsilons:
            print(f"{length:,} tokens, a bound of {epsilon:g} ...", file=sys.stderr)
            points.append(point(arguments, length, epsilon))
    same = ("model", "text", "split", "texts", "later", "seed")
    command = shlex.join(["bench/rows_by_head.py", *(word for word in sys.argv[1:])])
    shown = [json.dumps({"length": one["length"], "epsilon": one["epsilon"],
                         "rows_read": [[round(share, 4) for share in layer] for layer in one["rows_read"]]}) for one in points]
    arguments.out.write_text(json.dumps({
        "what": "the share of its rows in halves that a KV head reads in full under a bound, a mean over texts and queries",
        "command": command, "settings": {name: points[0][name] for name in same},
        "gates": [round(gate, 5) for gate in head_agreement.kv_scores(arguments.gates, None)]})[:-1]
        + ', "points": [\n  ' + ",\n  ".join(shown) + "\n]}\n", encoding="utf-8")
    shutil.rmtree(arguments.folder)


if __name__ == "__main__":
    main()
