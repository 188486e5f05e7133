# SPDX-License-Identifier: Apache-2.0
"""Tasks that `evaluate --write-tasks` has written, the rule that scores answers, and files of results. Needs nothing but
Python itself."""
import json
import os
from pathlib import Path

ASCII_LOWER = str.maketrans("ABCDEFGHIJKLMNOPQRSTUVWXYZ", "abcdefghijklmnopqrstuvwxyz")
TASK_KEYS = ("suite", "tokens", "seed", "number", "body", "ends", "questions")
QUESTION_KEYS = ("tokens", "answers", "rule", "max_tokens", "choices")


def load_tasks(path):
    """The tasks of a file, one on each line. @raises ValueError naming the line"""
    tasks = []
    with open(path, encoding="utf-8") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                task = json.loads(line)
                missing = [key for key in TASK_KEYS if key not in task]
                for question in task.get("questions", []):
                    missing += [key for key in QUESTION_KEYS if key not in question]
                    if question.get("rule") not in ("contains", "begins"):
                        raise ValueError(f"rule {question.get('rule')!r} is neither contains nor begins")
                    if not question.get("answers"):
                        raise ValueError("a question has no answers")
            except (ValueError, AttributeError, TypeError) as why:
                raise ValueError(f"{path}:{number}: {why}") from why
            if missing:
                raise ValueError(f"{path}:{number}: no {missing[0]!r}; evaluate --write-tasks writes such files")
            tasks.append(task)
    if not tasks:
        raise ValueError(f"{path} holds no task")
    return tasks


def score(question, output):
    """The share of the question's answers that the output holds. `contains`: anywhere, whatever the case of ASCII letters.
    `begins`: at its beginning. evaluate scores by the same rule; tests/tools/data/scored_answers.json judges both."""
    if question["rule"] == "begins":
        return float(output.startswith(question["answers"][0]))
    output = output.translate(ASCII_LOWER)
    answers = [answer.translate(ASCII_LOWER) for answer in question["answers"]]
    return sum(answer in output for answer in answers) / len(answers)


def best_choice(question, likelihoods):
    """1 if the right choice is the likeliest by byte, else 0. `likelihoods`: the sum of log-probabilities of each."""
    def by_byte(pair):
        choice, nats = pair
        return nats / len(choice["text"].encode())

    chosen, _ = max(zip(question["choices"], likelihoods), key=by_byte)
    return float(chosen["text"] == question["answers"][0])


def groups_of(tasks):
    """{(suite, tokens, seed): its tasks}: each is one point of a file of results."""
    groups = {}
    for task in tasks:
        groups.setdefault((task["suite"], task["tokens"], task["seed"]), []).append(task)
    return groups


POINT_KEYS = ("suite", "tokens", "seed", "plan", "ratio", "compress")


def key_of(point):
    return tuple(point[key] for key in POINT_KEYS)


def load_points(path, settings):
    """{key: point} of a file of results, none if there is no file. @raises ValueError if its settings differ"""
    if not Path(path).exists():
        return {}
    with open(path, encoding="utf-8") as file:
        known = json.load(file)
    if known.get("settings") != settings:
        raise ValueError(f"{path} was made with other settings: {json.dumps(known.get('settings'))}")
    return {key_of(point): point for point in known["points"]}


def write_points(path, command, settings, points):
    """Replaces the file as a whole, so that a run that is stopped leaves a good one."""
    what = ("the same tasks for every method. marks: a question each, 1 right; found: the share of several answers. kv_bytes: "
            "what the cache holds in memory when the answer begins, masks counted; row_bytes: the rows that attention sees. "
            "Means over the questions")
    lines = ",\n".join("  " + json.dumps(point, ensure_ascii=False) for point in points)
    text = (f'{{\n"what": {json.dumps(what)},\n"command": {json.dumps(command)},\n'
            f'"settings": {json.dumps(settings)},\n"points": [\n{lines}\n]\n}}\n')
    beside = f"{path}.part"
    Path(beside).write_text(text, encoding="utf-8")
    os.replace(beside, path)
