# SPDX-License-Identifier: Apache-2.0
"""The table of CONTRIBUTING.md that says what a run of all tests takes, from scripts/test-cost --out."""
import json

from .markdown import table


def test_cost(path):
    results = json.loads(path.read_text(encoding="utf-8"))
    context = results["context"]
    inside = {one["preset"]: one for one in results["presets"]}

    def row(stage):
        jobs = inside.get(stage["name"], {})
        return [stage["name"], f"{stage['seconds'] / 60:.1f}", *(str(jobs[part]) if jobs.get(part) else "" for part in ("compiling", "running"))]

    whole = sum(stage["seconds"] for stage in results["stages"]) / 60
    return (f"An empty compiler cache, {context['cores']} cores of {context['cpu']}, {context['date']}: {whole:.0f} minutes.\n\n"
            + table(["stage", "minutes", "seconds of its compiling", "of its tests"], [row(stage) for stage in results["stages"]]))


TABLES = {"test_cost": (["test_cost.json"], test_cost)}
