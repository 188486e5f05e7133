# SPDX-License-Identifier: Apache-2.0
"""The first part of docs/results.md: the tables on SmolLM2, from the measurements of ./scripts/reproduce --model smollm2.

Every number is a mean over questions with the interval that bootstrap over texts gives. A table whose JSON is not there says
by which command it is measured."""
import functools
import json
import math
import re
import statistics

import bootstrap
import head_agreement
import results
from peers import table as peers_table
from results import by, by_gates, name_of, of, setting_of

from .markdown import table

FAMILIES = {"niah_single_1": "a number in repeated noise", "niah_single_2": "a number in prose", "niah_single_3": "a code (UUID) in prose",
            "niah_multikey_1": "one of four numbers in prose", "niah_multikey_2": "one of many numbers, nothing else",
            "niah_multikey_3": "one of many codes, nothing else", "niah_multivalue": "four numbers of one thing",
            "niah_multiquery": "the numbers of four things", "vt": "variables that stand for one another",
            "cwe": "words that a list repeats most often", "fwe": "the same, with other frequencies",
            "qa_1": "a fact in one of many documents", "qa_2": "a fact that takes two documents",
            "choice_kind": "kinds", "choice_capital": "capitals", "choice_opposite": "opposites", "choice_larger": "sizes",
            "choice_ending": "the next sentence"}
SHARES = [1, 1 / 2, 1 / 4, 1 / 8, 1 / 16, 1 / 32]
TUNED = ("headkv", "snapkv", "pyramid", "adakv")


def measured_by(experiment):
    """Makes a table of no files say how it is measured; `make` gets runs, and only those that exist."""
    def decorate(make):
        @functools.wraps(make)
        def made(*paths):
            if not paths:
                return f"Not yet measured: `./scripts/reproduce --model smollm2 --only {experiment}`."
            return make(*map(results.read, paths))
        return made
    return decorate


def label(point):
    """The name of a plan for readers, in which a setting that was chosen on the validation split is called tuned."""
    method, _, settings = results.parts_of(point["method"])
    plain = results.plain_name(method)
    if settings and method.split("@")[0].split("+")[0] in TUNED:
        return f"{plain}, tuned ({', '.join(settings).replace('=', ' ')})"
    return name_of(point)


def with_numbers(point):
    """The same with its numbers, for plans that are not at a budget: "int4:128"."""
    return "full" if point["plan"] == "full" else f"`{point['plan']}`"


def interval(points, values=None):
    return bootstrap.interval(bootstrap.texts_of_points(points, values))


def difference(points, full, values=None):
    """Against the full cache on the same texts."""
    known = {(point["suite"], point["tokens"], point["seed"]): point for point in full}
    others = [known[point["suite"], point["tokens"], point["seed"]] for point in points]
    return bootstrap.difference(bootstrap.texts_of_points(points, values), bootstrap.texts_of_points(others, values))


def percent(found):
    return "" if math.isnan(found[0]) else bootstrap.shown(found, digits=0)


def points_more(found):
    mean, low, high = (100 * value for value in found)
    return "" if math.isnan(mean) else f"{mean:+.0f}" + ("" if math.isnan(low) else f" ({low:+.0f} to {high:+.0f})")


def asked(points):
    """How many questions and texts the points of a plan have."""
    said = set()
    for own in by(points, lambda point: (point["tokens"], point["plan"], point.get("share"))).values():
        texts = bootstrap.texts_of_points(own)
        said.add((sum(map(len, texts)), len(texts)))
    least, most = min(said), max(said)
    return f"{least[0]} questions on {least[1]} texts" if least == most else \
        f"{least[0]} to {most[0]} questions on {least[1]} to {most[1]} texts"


def picture(alt, name):
    return f"\n\n![{alt}](smollm2_{name}.png)"


@measured_by("tasks")
def tasks(*runs):
    points = [point for run in runs for point in run["points"]]
    lengths = sorted({point["tokens"] for point in points})
    rows = []
    for suite, own in by(points, lambda point: point["suite"]).items():
        cells = [percent(interval(of(own, tokens=length))) or "not asked" for length in lengths]
        rows.append([f"`{suite}`", FAMILIES.get(suite, ""), *cells])
    return (f"{asked(of(points, suite=points[0]['suite']))} at each length; % answered by the full cache, with the 95 % interval.\n\n"
            + table(["task", "what is asked", *(f"{length:,}" for length in lengths)], rows, left=2))


def found_by(name):
    """The name for readers of a folder of gates or a file of scores."""
    return results.GATES.get(name) or results.SCORES.get(name) or name.replace("_", " ")


def heads(*paths):
    if not paths:
        return "Not yet measured: `./scripts/reproduce --model smollm2 --only heads`."
    found = json.loads(paths[0].read_text(encoding="utf-8"))
    names = [found_by(name) for name in found["names"]]
    rows = [[name, *(f"{r:.2f} / {c:.0%}" for r, c in zip(correlations, common))]
            for name, correlations, common in zip(names, found["correlation"], found["common"])]
    return (f"Rank correlation of the {found['heads']} KV heads / share of the {found['kept']} heads that both would keep.\n\n"
            + table(["", *names], rows) + picture("Heads that each method finds", "heads"))


@measured_by("gates")
def gates(run):
    points = run["points"]
    full = of(points, plan="full")
    sparsities = sorted({setting_of(point)[0] for point in points if setting_of(point)})
    kinds = {}
    for name, own in by_gates([point for point in points if point["plan"] != "full"]).items():
        kinds.setdefault("random" if name.startswith("random") else name, []).extend(own)
    rows = [["full", *[percent(interval(full))] * len(sparsities), *[""] * len(sparsities)]]
    for name, own in kinds.items():
        at = [[point for point in own if setting_of(point) == [sparsity]] for sparsity in sparsities]
        if name == "random":
            plans = [by(here, lambda point: point["method"]).values() for here in at]
            means = [[100 * interval(plan)[0] for plan in here] for here in plans]
            rows.append([f"{len(means[0])} random plans, mean (worst to best)",
                         *(f"{statistics.fmean(mean):.0f} ({min(mean):.0f} to {max(mean):.0f})" for mean in means),
                         *(points_more(difference([point for plan in here for point in plan], full)) for here in plans)])
        else:
            rows.append([name, *(percent(interval(here)) for here in at), *(points_more(difference(here, full)) for here in at)])
    return (f"{asked(full)}, the same for each plan; % answered, with the 95 % interval.\n\n"
            + table(["gates", *(f"{100 * s:g} % stream" for s in sparsities), *(f"less full, {100 * s:g} %" for s in sparsities)], rows)
            + picture("Answers by gates", "gates"))


@measured_by("sinks")
def sinks(run):
    points = run["points"]
    full = of(points, plan="full")
    grid = by([point for point in points if point["plan"] != "full"],
              lambda point: (point["settings"]["sinks"], point["settings"]["recent"]))
    rows = [[f"{first}", *(percent(interval(grid.get((first, recent), []))) for recent in sorted({key[1] for key in grid}))]
            for first in sorted({key[0] for key in grid})]
    return (f"{asked(full)}; % answered with half of the heads streaming. The full cache answers {percent(interval(full))}.\n\n"
            + table(["first rows", *(f"latest {recent}" for recent in sorted({key[1] for key in grid}))], rows))


@measured_by("needles")
def needles(run):
    points = run["points"]
    full = of(points, plan="full")
    lengths = sorted({point["tokens"] for point in points})
    rows = []
    order = by(points, lambda point: (point.get("share", 1), label(point)))
    for (budget, name), own in sorted(order.items(), key=lambda item: -item[0][0]):
        rows.append([name if budget == 1 else f"{name}, {100 * budget:g} %",
                     *(percent(interval(of(own, tokens=length))) for length in lengths),
                     "" if budget == 1 else points_more(difference(own, full)),
                     f"{100 * results.bytes_share(own, full):.0f} %"])
    return (f"{asked(full)} at each length, the same for each plan; % found, with the 95 % interval.\n\n"
            + table(["method", *(f"{length:,}" for length in lengths), "less full", "KV rows kept"], rows)
            + picture("Pass keys by length and depth", "needles"))


@measured_by("settings")
def settings(run):
    text = []
    for method in ("headkv", "snapkv"):
        own = [point for point in run["points"] if results.parts_of(point["plan"])[0] == method]
        if not own:
            continue
        sizes = sorted({setting_of(point)[0] for point in own})
        chosen = results.chosen_setting(run["points"], method)
        rows = []
        for name, mine in by(own, lambda point: results.named_settings(point["plan"])).items():
            row = [name.replace("=", " ").replace(",", ", "),
                   *(percent(interval([point for point in mine if setting_of(point) == [size]])) for size in sizes),
                   f"{100 * interval(mine)[0]:.1f}"]
            rows.append([f"**{entry}**" for entry in row] if name == chosen else row)
        text.append(f"{results.METHODS[method]}, % answered on the validation split; {asked(own)}. The first row is the published "
                    "setting, the bold one is what the tables below call tuned.\n\n"
                    + table(["setting", *(f"{size:g} rows" for size in sizes), "mean"], rows))
    return "\n\n".join(text)


def families_of(points):
    return ", ".join(f"`{suite}`" for suite in by(points, lambda point: point["suite"]))


@measured_by("budgets")
def budgets(run):
    points = run["points"]
    full = of(points, plan="full")
    sizes = sorted({setting_of(point)[0] for point in points if setting_of(point)})
    rows = [["full", *[""] * (len(sizes) - 1), percent(interval(full))]]
    for name, own in by([point for point in points if point["plan"] != "full"], label).items():
        rows.append([name, *(percent(interval([point for point in own if setting_of(point)[0] == size])) for size in sizes)])
    return (f"{asked(full)} of {families_of(full)}; % answered, with the 95 % interval.\n\n"
            + table(["method", *(f"{size:g} rows" for size in sizes)], rows) + picture("Answers by rows", "budgets"))


def column_of(point, full):
    """The largest of SHARES that a plan fits: the one it was made for, or the bytes of its rows."""
    share = point.get("share", results.bytes_share([point], full))
    return max((column for column in SHARES if column / 2 * 1.02 < share or column == SHARES[-1]), default=1)


def at_equal_bytes(points):
    """Rows of a table with a column for each of SHARES; first the methods that give nine of ten of the full cache's
    answers at the fewest bytes."""
    full = of(points, plan="full")
    whole = interval(full)
    rows = []
    for name, own in by([point for point in points if point["plan"] != "full"],
                        lambda point: label(point) if "share" in point else with_numbers(point)).items():
        at = by(own, lambda point: column_of(point, full))
        found = {share: interval(here) for share, here in at.items()}
        enough = [share for share in found if found[share][0] >= 0.9 * whole[0]]
        rows.append((min(enough, default=2), -statistics.fmean(mean for mean, _, _ in found.values()),
                     [name, *(percent(found[share]) if share in found else "" for share in SHARES)]))
    rows.sort()
    return [row[-1] for row in rows]


def answered_in_full(points):
    full = of(points, plan="full")
    return (f"{asked(full)} of {families_of(full)}; % answered, with the 95 % interval. The full cache answers "
            f"{percent(interval(full))}; first come the methods that give nine of ten of these answers at the fewest bytes.\n\n")


@measured_by("combined")
def combined(run):
    return (answered_in_full(run["points"])
            + table(["method", "all bytes", *(f"1/{1 / share:.0f}" for share in SHARES[1:])], at_equal_bytes(run["points"]))
            + picture("Answers over bytes", "frontier"))


@measured_by("unasked")
def unasked(run, *others):
    """The full cache's answers are those of `run`; `others` are the same questions at other shares of the bytes."""
    points = run["points"] + [point for other in others for point in other["points"] if point["plan"] != "full"]
    measured = {point.get("share") for point in points}
    columns = [column for column, share in enumerate(SHARES) if share in measured]
    rows = [[row[0], *(row[1 + column] for column in columns)] for row in at_equal_bytes(points)]
    return answered_in_full(points) + table(["method", *(f"1/{1 / SHARES[column]:.0f}" for column in columns)], rows)


def unasked_theirs(*paths):
    """kvpress' methods on the same questions, by the rows that are left, and what their caches hold."""
    if not paths:
        return "Not yet measured: the commands are in [bench/peers](../bench/peers/README.md#before-any-question-is-known)."
    points = [point for path in paths for point in json.loads(path.read_text(encoding="utf-8"))["points"]]
    full = of(points, plan="full")
    ratios = sorted({point["ratio"] for point in points if point["ratio"] > 1})
    rows = []
    for plan, own in by([point for point in points if point["plan"] != "full"], lambda point: point["plan"]).items():
        cells = [interval(of(own, ratio=ratio)) for ratio in ratios]
        held = [statistics.fmean(point["kv_bytes"] for point in of(own, ratio=ratio)) for ratio in ratios]
        whole = statistics.fmean(point["kv_bytes"] for point in full)
        rows.append((-cells[0][0], [results.plain_name(plan.replace("expected_attention", "expected")), *map(percent, cells),
                                    " and ".join(f"{100 * one / whole:.0f} %" for one in held)]))
    rows.sort(key=lambda row: row[0])
    return (f"{asked(of(points, plan='full'))}; % answered, with the 95 % interval. Their full cache answers {percent(interval(full))}.\n\n"
            + table(["kvpress", *(f"1/{ratio} of the rows" for ratio in ratios), "memory that the caches hold"], [row for _, row in rows]))


def nats(point):
    return point["token_nats"]


def number(found, digits=3, sign=False):
    mean, low, high = found
    if math.isnan(mean):
        return ""
    shown = f"{mean:{'+' if sign else ''}.{digits}f}"
    return shown if math.isnan(low) else f"{shown} ({low:{'+' if sign else ''}.{digits}f} to {high:{'+' if sign else ''}.{digits}f})"


@measured_by("language")
def language(*runs):
    """KL divergence for each text, surprise and agreement over all texts, by length."""
    points = [{**point, "text": run["settings"]["text"]} for run in runs for point in run["points"] if "text_kl" in point]
    text = []
    for length in sorted({point["tokens"] for point in points}, reverse=True):
        here = of(points, tokens=length)
        names = sorted({point["text"] for point in here}, key=lambda name: (name == "code", name))
        full = {name: of(here, text=name, plan="full") for name in names}
        rows = []
        for plan, own in by([point for point in here if point["plan"] != "full"], lambda point: point["plan"]).items():
            kl = [number(interval(of(own, text=name), lambda point: point["text_kl"])) for name in names]
            more = bootstrap.difference(
                [one for name in names for one in bootstrap.texts_of_points(of(own, text=name), nats)],
                [one for name in names for one in bootstrap.texts_of_points(full[name], nats)])
            same = interval(own, lambda point: point["text_same"])
            rows.append([f"`{plan}`", *kl, number(more, sign=True), f"{100 * same[0]:.1f}"])
        texts = len(bootstrap.texts_of_points(full[names[0]], nats))
        surprise = ", ".join(f"{interval(full[name], nats)[0]:.2f} on {name}" for name in names)
        text.append(f"Texts of {length:,} tokens, {texts} of each kind, with the 95 % interval. The full cache's own surprise is "
                    f"{surprise} (nats a token).\n\n"
                    + table(["plan", *(f"KL, {name}" for name in names), "more surprise, nats a token", "same likeliest token, %"], rows))
    return "\n\n".join(text) + picture("KL divergence to the full cache", "language")


CERTAINTIES = {"sure": "", "four_sigma": ", four sigma", "none": ", none (top-p)"}


def bounded_label(point):
    """A plan of the experiment `bounds` for readers."""
    settings = point.get("settings", {})
    if "epsilon" not in settings:
        return f"`{point['plan']}`"
    name = point["plan"].split(":")[0]
    return f"`{name}:{settings['epsilon']:g}`{CERTAINTIES[settings['certainty']]}"


@measured_by("bounds")
def bounds(*runs):
    """Plans by the bytes that a token reads, the most first."""
    points = [point for run in runs for point in run["points"]]
    texts = [point for point in points if "text_kl" in point]
    answers = [point for point in points if "marks" in point]
    full = of(texts, plan="full")

    def read(own):
        return interval(own, lambda point: point["text_bytes_read"])[0]

    rows = []
    for own in by(texts, lambda point: point["plan"]).values():
        plan = own[0]["plan"]
        asked_of = of(answers, plan=plan)
        rows.append((read(own), [bounded_label(own[0]), f"{100 * read(own) / read(full):.0f} %",
                                 f"{100 * results.bytes_share(own, full):.0f} %",
                                 number(interval(own, lambda point: point["text_kl"]), 4),
                                 f"{100 * interval(own, lambda point: point['text_same'])[0]:.1f}",
                                 *([percent(interval(asked_of))] if answers else [])]))
    rows.sort(key=lambda row: -row[0])
    told = f"{len(bootstrap.texts_of_points(full, lambda point: point['text_kl']))} texts, with the 95 % interval"
    if answers:
        told += f"; {asked(of(answers, plan='full'))}"
    return (told + ".\n\n" + table(["plan", "read for a token", "kept", "KL, nats a token", "same likeliest token, %",
                                    *(["answered, %"] if answers else [])], [row for _, row in rows]))


def kinds_of_heads(gates):
    """Names of kinds, and of each the indices of its heads: halves by DuoAttention's gates."""
    kept = head_agreement.kept(gates, 0.5)
    return {"half with the larger gates": sorted(kept),
            "half with the smaller gates": [i for i in range(len(gates)) if i not in kept],
            "all": list(range(len(gates)))}


def shares_of(point, heads):
    flat = [share for layer in point["rows_read"] for share in layer]
    return sorted(flat[i] for i in heads)


@measured_by("rows")
def rows_by_head(run):
    """Median, and the tenth and ninetieth hundredth, of the heads' rows."""
    lengths = sorted({point["length"] for point in run["points"]})
    rows = []
    for epsilon in sorted({point["epsilon"] for point in run["points"]}, reverse=True):
        for name, heads in kinds_of_heads(run["gates"]).items():
            cells = []
            for length in lengths:
                shares = shares_of(of(run["points"], epsilon=epsilon, length=length)[0], heads)
                low, *_, high = statistics.quantiles(shares, n=10)
                cells.append(f"{100 * statistics.median(shares):.0f} ({100 * low:.0f} to {100 * high:.0f})")
            rows.append([f"{100 * epsilon:g} %", name, *cells])
    return (f"% of the rows, the median of the heads and what eight of ten lie between; {run['settings']['texts']} texts for each number.\n\n"
            + table(["bound", "heads", *(f"{length:,} tokens" for length in lengths)], rows)
            + picture("Rows read under a bound over the length of the text", "rows"))


READS = re.compile(r"bounded@.*/(\d)_(\d)\.json:")


def reads_label(point):
    """A plan of the experiment `reads` for readers: those that were searched by what they may read."""
    found = READS.match(point["plan"])
    return f"searched for {found[1]}/{found[2]}" if found else f"`{point['plan']}`"


@measured_by("reads")
def reads(run):
    """Plans by the bytes that a token reads, the most first."""
    points = [point for point in run["points"] if "text_kl" in point]
    full = of(points, plan="full")

    def read(own):
        return interval(own, lambda point: point["text_bytes_read"])[0]

    rows = [(read(own), [reads_label(own[0]), f"{100 * read(own) / read(full):.0f} %",
                         f"{100 * results.bytes_share(own, full):.0f} %",
                         number(interval(own, lambda point: point["text_kl"]), 4),
                         f"{100 * interval(own, lambda point: point['text_same'])[0]:.1f}"])
            for own in by(points, lambda point: point["plan"]).values()]
    rows.sort(key=lambda row: -row[0])
    texts = len(bootstrap.texts_of_points(full, lambda point: point["text_kl"]))
    return (f"{texts} texts, with the 95 % interval.\n\n"
            + table(["plan", "read for a token", "kept", "KL, nats a token", "same likeliest token, %"], [row for _, row in rows]))


@measured_by("choices")
def choices(run):
    points = run["points"]
    suites = list(by(points, lambda point: point["suite"]))
    full = of(points, plan="full")
    rows = []
    for plan, own in by(points, lambda point: point["plan"]).items():
        rows.append([with_numbers(own[0]), *(percent(interval(of(own, suite=suite))) for suite in suites),
                     "" if plan == "full" else points_more(difference(own, full))])
    return (f"{asked(of(full, suite=suites[0]))} of each kind, four endings each; % chosen rightly, with the 95 % interval.\n\n"
            + table(["plan", *(FAMILIES.get(suite, suite) for suite in suites), "less full, all kinds"], rows))


@measured_by("storage")
def storage(*runs):
    points = [point for run in runs for point in run["points"]]
    questions = [point for point in points if "marks" in point]
    texts = [point for point in points if "text_kl" in point]
    full, full_text = of(questions, plan="full"), of(texts, plan="full")
    rows = []
    for plan, own in by(texts, lambda point: point["plan"]).items():
        mine = of(questions, plan=plan)
        rows.append([f"`{plan}`", number(interval(own, lambda point: point["text_kl"]), 4),
                     number(difference(own, full_text, nats), sign=True), percent(interval(mine)) if mine else "",
                     f"{100 * results.bytes_share(own, full_text):.1f} %",
                     f"{100 * results.bytes_share(own, full_text, 'kv_bytes'):.1f} %"])
    return (f"{len(bootstrap.texts_of_points(full_text, nats))} continued texts; {asked(full)} of {families_of(full)}, with the "
            "95 % interval.\n\n"
            + table(["plan", "KL, nats a token", "more surprise, nats a token", "answered, %", "KV rows kept", "with pages"], rows))


def plan_name(plan):
    """A plan's name without the folder of its gates."""
    return re.sub(r"@[^:]*", "", plan)


def memory(*paths):
    if not paths:
        return "Not yet measured: `./scripts/reproduce --model smollm2 --only memory`."
    found = json.loads(paths[0].read_text(encoding="utf-8"))
    full = found["bytes"]["full"]
    rows = [[f"`{plan_name(plan)}`", *(f"{size / 1e6:.1f}" for size in sizes), f"{full[-1] / sizes[-1]:.1f}",
             f"{int(16e9 // sizes[-1]):,}"] for plan, sizes in found["bytes"].items()]
    return (table(["plan", *(f"{length:,}, MB" for length in found["contexts"]), "times smaller",
                   f"texts of {found['contexts'][-1]:,} in 16 GB"], rows)
            + picture("Memory and time over the length of the text", "memory"))


def peers(*paths):
    """Ours against the same questions in kvpress and transformers (bench/peers)."""
    files = {path.stem: json.loads(path.read_text(encoding="utf-8")) for path in paths}
    ours = [file for name, file in files.items() if name.startswith("peers_ours")]
    theirs = [file for name, file in files.items() if name.startswith("peers_theirs")]
    if not ours or not theirs:
        return "Not yet measured: the commands are in [bench/peers](../bench/peers/README.md)."
    return ("Each cell is the share of questions answered and the memory that the cache held, of what the same system's full cache "
            "holds; in brackets the rows that attention sees, where these are fewer.\n\n"
            + peers_table.table({**peers_table.rows_of_ours(ours), **peers_table.rows_of_theirs(theirs)}))


TABLES = {f"smollm2_{name}": ([f"smollm2/{file}" for file in files], make) for name, files, make in [
    ("tasks", ["tasks_*.json"], tasks), ("heads", ["heads.json*"], heads), ("gates", ["gates.json*"], gates),
    ("sinks", ["sinks.json*"], sinks), ("needles", ["needles.json*"], needles), ("settings", ["settings.json*"], settings),
    ("budgets", ["budgets.json*"], budgets), ("combined", ["combined.json*"], combined),
    ("unasked", ["unasked.json*"], unasked), ("unasked_ten", ["unasked_ten.json*", "unasked_ten_ends.json*"], unasked),
    ("unasked_theirs", ["unasked_theirs*.json"], unasked_theirs), ("bounds", ["bounds*.json"], bounds),
    ("rows", ["rows_by_head.json*"], rows_by_head), ("reads", ["reads.json*"], reads),
    ("language", ["language_*.json"], language), ("choices", ["choices.json*"], choices),
    ("storage", ["storage*.json"], storage), ("memory", ["memory.json*"], memory), ("peers", ["peers_*.json"], peers)]}
