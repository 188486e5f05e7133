# SPDX-License-Identifier: Apache-2.0
"""Random templates print what Jinja prints, or are refused.

    random_test.py <render program> [--seed N] [--templates N]

Expressions of all operators, filters, tests and methods over values of every kind, in blocks of every kind. Most of them mean nothing and
fail; what is printed must be Jinja's. Skipped (77) without jinja2.
"""
import argparse
import collections
import copy
import datetime
import json
import random
import re
import subprocess
import sys
import warnings

SKIP = 77
NOW = datetime.datetime(2026, 3, 4, 5, 6, 7)
try:
    from make_goldens import NAMES
    from reference import environment
except ImportError:
    print("skipped: jinja2 is not installed (Debian: python3-jinja2)")
    sys.exit(SKIP)

LITERALS = ["1", "0", "-3", "2.5", "'a b'", "''", "'-x-'", "none", "true", "false", "[1, 2]", "[]", "{'k': 1}", "{}", "(1,)", "'é'", "' q '"]
FILTERS = ["trim", "upper", "lower", "title", "capitalize", "length", "list", "first", "last", "string", "tojson", "int", "float", "abs", "sort", "unique",
           "reverse", "sum", "min", "max", "join", "default('z')", "d(1, true)", "items", "dictsort", "round", "safe", "select", "reject", "map('string')",
           "map('upper')", "replace('a', 'bb')", "join('-')", "tojson(indent=1)", "indent(2)", "count", "selectattr('name')", "map(attribute='name')",
           "trim('-')", "attr('x')", "round(1)", "map('length')", "select('string')", "rejectattr('age', 'gt', 1)", "sort(reverse=true)", "format(1)"]
TESTS = ["defined", "undefined", "none", "string", "number", "mapping", "iterable", "sequence", "true", "false", "integer", "float", "boolean", "odd", "even",
         "in [1, 2]", "eq 1", "ne 'a b'", "gt 1", "lt 2.5", "sameas none", "divisibleby 2", "lower", "upper", "callable"]
SIGNS = ["+", "-", "*", "/", "//", "%", "~", "==", "!=", "<", ">", "<=", ">=", "in", "not in", "and", "or", "**"]
METHODS = ["strip()", "split()", "split(' ')", "upper()", "lower()", "items()", "keys()", "get('k')", "get('k', 5)", "startswith('a')", "endswith('x')",
           "replace('a', 'b')", "count('a')", "find('b')", "join(words)", "title()", "lstrip('-')", "rstrip()", "splitlines()", "values()", "index(1)", "copy()",
           "isdigit()", "format(1, 2)", "removeprefix('a')", "partition(' ')", "name", "content", "role", "k", "append(1)", "pop()"]
PLACES = ["0", "-1", "1", "1:", "::-1", ":2", "5", "'name'"]
# What Python prints of objects that have no text.
NO_TEXT = re.compile(r"<(generator|built-in|bound|function|Macro|jinja2|class|async)|object at 0x|dict_(items|keys|values)\(|range\(")


class Templates:
    def __init__(self, seed):
        self.random = random.Random(seed)
        self.names = [*NAMES, "missing"]

    def expression(self, depth):
        pick, kind = self.random.choice, self.random.random()
        inner = lambda: self.expression(depth - 1)
        if depth <= 0 or kind < 0.25:
            return pick(self.names) if self.random.random() < 0.6 else pick(LITERALS)
        if kind < 0.42:
            return f"{inner()}|{pick(FILTERS)}"
        if kind < 0.50:
            return f"({inner()} is {pick(['', 'not '])}{pick(TESTS)})"
        if kind < 0.68:
            return f"({inner()} {pick(SIGNS)} {inner()})"
        if kind < 0.78:
            return f"({inner()}).{pick(METHODS)}"
        if kind < 0.86:
            return f"({inner()})[{pick([*PLACES, self.expression(0)])}]"
        if kind < 0.90:
            return f"({inner()} if {inner()} else {inner()})"
        if kind < 0.93:
            return f"[{inner()}, {inner()}]"
        return f"not {inner()}" if kind < 0.96 else f"-{inner()}"

    def template(self, depth):
        pick, kind = self.random.choice, self.random.random()
        inner = lambda: self.template(depth - 1)
        if depth <= 0 or kind < 0.4:
            return "{{" + pick(["", "-"]) + f" {self.expression(2)} " + pick(["", "-"]) + "}}" + pick(["", " ", "\n", "  \n "])
        if kind < 0.55:
            return ("{%" + pick(["", "-", "+"]) + f" if {self.expression(2)} " + pick(["", "-"]) + "%}" + inner() + "{% else %}" + inner() +
                    pick(["", "  "]) + "{% endif %}\n")
        if kind < 0.75:
            return (f"{{% for v in {self.expression(1)}" + pick(["", f" if {self.expression(1)}"]) + " %}{{ v }}{{ loop.index }}" + inner() +
                    "{% set w = v %}{% else %}e{% endfor %}")
        if kind < 0.85:
            return f"{{% set {pick(['w', 'x', 'word'])} = {self.expression(2)} %}}\n" + inner() + "{{ w }}"
        if kind < 0.92:
            return "{% macro m(a, b=2) %}{{ a }}{{ b }}" + inner() + f"{{% endmacro %}}{{{{ m({self.expression(1)}) }}}}"
        return inner() + pick([" ", "\n", "\t", "x"]) + inner()


def expected(template):
    try:
        return environment(NOW).from_string(template).render(**copy.deepcopy(NAMES))  # nonsense can change what it is given
    except Exception:  # whatever Python raises
        return None


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--templates", type=int, default=3000)
    options = parser.parse_args()
    warnings.simplefilter("ignore")  # Python's of the code that Jinja makes of nonsense
    make = Templates(options.seed)
    templates = [make.template(3) for _ in range(options.templates)]
    now = [NOW.year, NOW.month, NOW.day, NOW.hour, NOW.minute, NOW.second]
    lines = "".join(json.dumps({"template": template, "names": NAMES, "now": now}) + "\n" for template in templates)
    answers = subprocess.run([options.program], input=lines, capture_output=True, text=True, encoding="utf-8", check=True).stdout.splitlines()
    assert len(answers) == len(templates), f"{len(answers)} answers to {len(templates)} templates"
    counts, wrong = collections.Counter(), []
    for template, answer in zip(templates, map(json.loads, answers)):
        text, right = answer.get("text"), expected(template)
        if text is None:
            counts["both fail" if right is None else "only ours refuses"] += 1
        elif text == right:
            counts["the same text"] += 1
        elif right is not None and NO_TEXT.search(right):
            counts["an object's address"] += 1
        else:
            wrong.append((template, text, right))
    print(f"{options.templates} templates, seed {options.seed}: " + ", ".join(f"{count} {what}" for what, count in counts.most_common()) +
          f", {len(wrong)} wrong")
    for template, text, right in wrong[:5]:
        print(f"  {template}\n    ours   {text!r}\n    Jinja  {right!r}")
    assert not wrong, f"{len(wrong)} templates print something else than Jinja"
    assert counts["the same text"] > options.templates // 5, "too few templates print something"


if __name__ == "__main__":
    main()
