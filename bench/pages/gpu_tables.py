# SPDX-License-Identifier: Apache-2.0
"""What GPUs have said so far (scripts/gpu-results), in docs/performance.md and docs/not_yet_measured.md; and what a kit has."""
import json
import re
from pathlib import Path

import peers_torch
import predicted_cuda

from .markdown import table

BENCHES = ("attention", "llama", "capacity", "triforce")
VERDICTS = ("ok", "failed", "stopped", "skipped", "not run", "not asked")  # as a kit's run says how a part ended
OPEN = json.loads((Path(__file__).parent.parent / "open_on_gpu.json").read_text(encoding="utf-8"))


def mebibytes(count):
    return f"{count / 2**20:.1f} MiB"


def gpus(paths):
    """{device: rows of every bench} of the files of scripts/gpu-results and gpu-attention."""
    found = {}
    for path in paths:
        run = peers_torch.load(path)
        beside = path.with_name(path.name.replace("_attention.json", "_peers.json"))
        peers = peers_torch.load(beside) if beside != path and beside.exists() else {}
        found.setdefault(run["context"]["device"], []).extend(peers_torch.rows_of(run, peers))
    return found


def cuda_goals(*paths):
    """A column for each GPU that was measured."""
    runs = gpus(paths)
    rows, counted = [], predicted_cuda.loops()
    for goal in peers_torch.GOALS:
        cells = []
        for run in runs.values():
            said = [peers_torch.verdict(judged, run) for judged in goal.get("judged", [])]
            cells.append("; ".join(f"{reached}: {'met' if good == 'yes' else '**missed**'}"
                                   for reached, good in filter(None, said)) or "not yet measured")
        rows.append([goal["what"], goal["shapes"], goal["limit"], goal["goal"], predicted_cuda.predicted(goal, counted)]
                    + (cells or ["not yet measured"]))
    titles = ["what", "shapes", "limit on an H100", "to reach", "predicted for an H100, not measured"] + (list(runs) or ["measured"])
    return table(titles, rows, left=len(titles))


def counts(parts):
    """"12 ok, 1 failed" of the parts of a run."""
    verdicts = [part["verdict"] for part in parts]
    return ", ".join(f"{verdicts.count(verdict)} {verdict}" for verdict in sorted(set(verdicts), key=VERDICTS.index))


def gpu_state(*paths):
    """Which GPUs have run a kit, and how its parts ended."""
    if not paths:
        return ("**No number on this page was taken on a GPU yet.** The kernels were written and tested without one, on\n"
                "the host emulation in `tests/simt`. Every cell that needs a GPU says \"not yet measured\"; the limits\n"
                "next to them are computed.")
    lines = []
    for path in paths:
        run = json.loads(path.read_text(encoding="utf-8"))
        context = run["context"]
        failed = [f"`{part['part']}` ({part['verdict']})" for part in run["parts"] if part["verdict"] in ("failed", "stopped")]
        lines.append(f"- **{context['device']}**, kit of {context.get('commit', 'an unknown commit')} for {context.get('target', 'an unknown target')}: "
                     f"parts {counts(run['parts'])}" + (f"; not ok: {', '.join(failed)}" if failed else ""))
    return "Measured so far, by [kits](#to-fill-this-page); a cell that no run has filled says \"not yet measured\":\n\n" + "\n".join(lines)


def is_closed(item, runs):
    """Whether on some GPU every part that the item asks for has passed; a part that a run was not asked for has not."""
    for run in runs:
        asked = [part for part in run["parts"] if re.fullmatch(item.get("closed_by", "(?!)"), part["part"])]
        if asked and all(part["verdict"] == "ok" for part in asked):
            return True
    return False


def gpu_open(*paths):
    """What no GPU has said yet."""
    runs = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    if runs:
        begin = f"**On a GPU.** Run so far on {', '.join(run['context']['device'] for run in runs)} ([parts](performance.md)). Open are:"
    else:
        begin = ("**On a GPU: everything.** The CUDA engine compiles for sm_80, sm_90 and sm_90a, its PTX assembles for sm_86, 89, 100 and 120 as well, its registers are known\n"
                 "([list](ptxas.md)), the instructions of its loops are counted ([table](gpu_instructions.md)), and its kernels run under tests on a host emulation. No GPU has run it. Open are:")
    items = [item["what"] for item in OPEN if not is_closed(item, runs)]
    return begin + "\n\n" + "".join(f"- {what};\n" for what in items[:-1]) + (f"- {items[-1]}." if items else "- nothing.")


def gpu_kit(*paths):
    """What is in a kit."""
    if not paths:
        return "What a kit has, and how large it is, `./scripts/gpu-kit --record` writes here; not yet recorded."
    kit = json.loads(paths[0].read_text(encoding="utf-8"))
    rows = [[f"`{program['name']}`", program["about"], mebibytes(program["bytes"])] for program in kit["programs"]]
    rows.append(["`lib/`", ", ".join(kit["libraries"]), mebibytes(kit["library_bytes"])])
    rows.append(["the rest", "the shipped model, its text, goldens, PyTorch's side of the comparison, `run`", mebibytes(kit["data_bytes"])])
    return (table(["what", "for", "size"], rows, left=2)
            + f"\n\nPacked, for {kit['target']} by {kit['compiler']}: {mebibytes(kit['archive_bytes'])}. {compiling_of(kit['compiling'])}")


def compiling_of(cost):
    """What compiling a kit took."""
    dearest = ", ".join(f"`{each['name']}` {each['user_seconds']} s" for each in cost["dearest"])
    benches = ", ".join(f"`{name}` {seconds} s" for name, seconds in cost["benches"].items())
    return (f"Compiling its {cost['objects']} objects takes {cost['user_seconds']:,} user seconds, all of them added up ({cost['processor']}); "
            f"the dearest: {dearest}; a bench: {benches}.")


GOAL_FILES = [f"gpu_*_{bench}.json" for bench in BENCHES]
PARTS = ["gpu_*_parts.json"]
