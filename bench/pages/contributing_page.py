# SPDX-License-Identifier: Apache-2.0
"""The tables of CONTRIBUTING.md that say where the time of a whole run goes, from scripts/test-cost --keep."""
import json

from .markdown import table

LONG = 20  # seconds: what runs for longer is named
SHOWN = 12


def read(paths):
    """The kept runs, the latest last."""
    return sorted((json.loads(path.read_text(encoding="utf-8")) for path in paths), key=lambda run: (run["context"]["date"], run["name"]))


def stages(*paths):
    runs = read(paths)
    names = list(dict.fromkeys(stage["name"] for run in runs for stage in run["stages"]))
    seconds = [{stage["name"]: stage["seconds"] for stage in run["stages"]} for run in runs]
    rows = [[name, *(f"{run[name] / 60:.1f}" if name in run else "-" for run in seconds)] for name in names]
    rows.append(["in all", *(f"{sum(run.values()) / 60:.1f}" for run in seconds)])
    about = [f"- `{run['name']}`: {run['context']['cpu']}, {run['context']['cores']} cores, commit {run['context']['commit']}, {run['context']['date']}, "
             f"with {', '.join(run['context']['rota'])} of the rota; "
             + "; ".join(f"{one['preset']} {one['compiling']} s of compiling and {one['running']} s of running" for one in run["presets"])
             for run in runs]
    return table(["minutes", *(f"`{run['name']}`" for run in runs)], rows) + "\n\n" + "\n".join(about)


def longest(*paths):
    """Of the latest run: objects, with the templates that most of their code is instances of, and tests."""
    run = read(paths)[-1]
    compiled = [["compiling", f"{one['preset']}: `{one['target']}`, `{one['name'].rsplit('/', 1)[1].split('.')[0]}`",
                 ", ".join(f"`{each['name'].removeprefix('kvpolicy::')}`" for each in one["instantiates"]), f"{one['seconds']:.0f}"]
                for one in run["objects"][:SHOWN]]
    ran = [["running", f"{one['preset']}: `{one['name']}`", "", f"{one['seconds']:.0f}"] for one in run["tests"] if one["seconds"] > LONG]
    return table(["", f"in `{run['name']}`", "most of its code", "seconds"], compiled + ran, left=3)


RUNS = ["test_cost_*.json"]
TABLES = {"test_stages": (RUNS, stages), "test_longest": (RUNS, longest)}
