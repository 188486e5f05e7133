# SPDX-License-Identifier: Apache-2.0
"""Texts with facts hidden in them, and the questions that ask for the facts.

The text is the King James Bible as Debian's `bible-kjv` prints it, one line without verse
numbers. Sentences such as `The key of Bamelo is 48213. ` are inserted into a slice of it; it ends with
`\nWhat is the key of Bamelo? `, and the right continuation is `The key of Bamelo is 48213.`.

New names and keys are drawn for every text, so a model cannot learn them by heart but has to find the
sentence. README.md describes the format for programs in other languages; this file is its definition.
"""
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path

import numpy as np

CONSONANTS = "bdfghjklmnprstvz"
VOWELS = "aeiou"
HELD_OUT = 0.02          # The last share of the King James text is never trained on.
POSITIONS = 10240        # Stretched positions stay below this.
# On average a digit of an answer counts as much as ten bytes of text. The first digit counts most: it can
# only be found by the name, while the others can be found by the digits before them.
FIRST_DIGIT_WEIGHT = 30.0
OTHER_DIGIT_WEIGHT = 5.0
NAME_WEIGHT = 5.0    # each letter of the name in an answer
BOUNDARY = re.compile(rb"[.:;?!] ")

QUESTION_BYTES = 28      # len("\nWhat is the key of Bamelo? ")
ANSWER_BYTES = 27        # len("The key of Bamelo is 48213.")
DIGITS_AT = 21           # where the digits begin in an answer


def read_kjv(path=None):
    """The whole text as bytes: from `path` if given, else from the program `bible`."""
    if path:
        return Path(path).read_bytes()
    printed = subprocess.run(["bible", "-f", "gen1:1-rev22:21"], check=True, capture_output=True)
    # Each line is "Ge1:1 In the beginning ..."; the reference ends at the first space.
    lines = printed.stdout.decode("ascii").splitlines()
    return " ".join(line.split(" ", 1)[1].strip() for line in lines if " " in line).encode()


def split(text):
    """(training part, held-out part)."""
    cut = len(text) - int(len(text) * HELD_OUT)
    return text[:cut], text[cut:]


def draw_names(rng, count):
    """Distinct names of three syllables: a consonant and a vowel each."""
    names = set()
    while len(names) < count:
        c, v = rng.integers(len(CONSONANTS), size=3), rng.integers(len(VOWELS), size=3)
        names.add("".join(CONSONANTS[i] + VOWELS[j] for i, j in zip(c, v)).capitalize())
    names = sorted(names)    # a set's order changes from run to run
    rng.shuffle(names)
    return names


def fact(name, key):
    return f"The key of {name} is {key}. ".encode()


def older(elder, younger):
    return f"{elder} is older than {younger}. ".encode()


def ask(name):
    return f"\nWhat is the key of {name}? ".encode()


def ask_older(first, second):
    return f"\nWhat is the key of the older of {first} and {second}? ".encode()


def answer(name, key):
    return f"The key of {name} is {key}.".encode()


@dataclass
class Sample:
    """One text with its questions, `length` bytes and one more (the target of the last byte)."""
    tokens: np.ndarray     # [length + 1] uint8
    weights: np.ndarray    # [length + 1] float32, the loss weight of predicting each byte
    body: int              # bytes before the first question
    answers: list          # (start of the answer, answer bytes, is it a two-step question)
    facts: list            # (start of the fact that each answer needs)


def make_sample(rng, text, length, facts, questions, pairs=0, earliest_only=None, restate=False):
    """Draws a text of `length` bytes that ends with `questions` questions and answers.

    `facts` keys are hidden in it, and `pairs` sentences about who is older, over disjoint pairs
    of the names. The first `pairs` questions (at most) are two-step ones. `earliest_only` keeps the
    facts asked for within the first so many bytes of the body. `restate` repeats the facts in place
    of questions and answers: half the bytes for a lookup, good to learn it from.
    """
    pairs = min(pairs, facts // 2)
    two_step = min(pairs, questions)
    questions = min(questions, facts)
    names = draw_names(rng, facts)
    keys = [f"{k:05d}" for k in rng.integers(100000, size=facts)]
    key_of = dict(zip(names, keys))

    asked = []
    for i in range(two_step):
        pair = [names[2 * i], names[2 * i + 1]]
        elder = pair[0]
        rng.shuffle(pair)
        asked.append((ask_older(*pair), elder, True))
    singles = names[2 * two_step:] if facts - 2 * two_step >= questions - two_step else names
    asked += [(ask(n), n, False) for n in singles[:questions - two_step]]
    if restate:
        asked = [(b"\n", n, False) for _, n, _ in asked]
    order = rng.permutation(len(asked))
    asked = [asked[i] for i in order]

    hidden = [(fact(n, key_of[n]), n) for n in names]
    hidden += [(older(names[2 * i], names[2 * i + 1]), None) for i in range(pairs)]
    tail = sum(len(q) + ANSWER_BYTES for q, _, _ in asked)
    plain = length + 1 - tail - sum(len(h) for h, _ in hidden)
    if plain < 1:
        raise ValueError(f"{facts} facts and {len(asked)} questions do not fit {length} bytes")

    # The slice begins after a boundary so that its first sentence is whole.
    at = int(rng.integers(len(text) - plain - 2000))
    at = BOUNDARY.search(text, at).end()
    slice_ = text[at:at + plain]
    boundaries = [0] + [m.end() for m in BOUNDARY.finditer(slice_)]
    wanted = {n for _, n, _ in asked}
    spots = []
    for _, n in hidden:
        allowed = boundaries
        if earliest_only is not None and n in wanted:
            allowed = [p for p in boundaries if p < earliest_only * plain / length] or [0]
        spots.append(allowed[int(rng.integers(len(allowed)))])
    # Ties are broken at random: if the fact asked for came first of those at one position, a model would
    # learn that instead of reading names.
    ties = rng.permutation(len(hidden))
    hiding = sorted(range(len(hidden)), key=lambda i: (spots[i], ties[i]))

    out, start_of, last = bytearray(), {}, 0
    weight_runs = []    # (start, end, weight) where it is not 1
    for i in hiding:
        out += slice_[last:spots[i]]
        last = spots[i]
        sentence, n = hidden[i]
        if n is None:
            weight_runs.append((len(out), len(out) + 6, 0.0))
        else:    # a new name and key cannot be predicted
            start_of[n] = len(out)
            weight_runs.append((len(out) + 11, len(out) + 17, 0.0))
            weight_runs.append((len(out) + 21, len(out) + 26, 0.0))
        out += sentence
    out += slice_[last:]
    body = len(out)

    answers = []
    for question, n, is_two_step in asked:
        name_at = len(out) + (12 if restate else len(question) - 2 - 6)
        weight_runs.append((name_at, name_at + 6, 0.0))
        if is_two_step:
            weight_runs.append((name_at - 11, name_at - 5, 0.0))
        out += question
        if not restate:    # in a two-step question, which of the two names is the first step
            weight_runs.append((len(out) + 11, len(out) + 17, NAME_WEIGHT))
        digits = len(out) + DIGITS_AT
        weight_runs.append((digits, digits + 1, FIRST_DIGIT_WEIGHT))
        weight_runs.append((digits + 1, digits + 5, OTHER_DIGIT_WEIGHT))
        if not restate:
            answers.append((len(out), answer(n, key_of[n]), is_two_step))
        out += answer(n, key_of[n])

    weights = np.ones(len(out), np.float32)
    for start, end, w in weight_runs:
        weights[start:end] = w
    return Sample(np.frombuffer(bytes(out), np.uint8), weights, body, answers,
                  [start_of[n] for _, n, _ in asked])


def stretched_positions(rng, length, body):
    """Positions with gaps at one to three random positions in the body (PoSE).

    So the model sees every distance up to POSITIONS at the cost of a short text. The questions have
    no gaps, as in later use.
    """
    positions = np.arange(length, dtype=np.int64)
    gaps = int(rng.integers(1, 4))
    total = int(rng.integers(0, max(1, POSITIONS - length)))
    cuts = np.sort(rng.integers(1, max(2, body), size=gaps))
    shares = np.diff(np.concatenate([[0], np.sort(rng.random(gaps - 1)), [1.0]])) * total
    for cut, share in zip(cuts, shares):
        positions[cut:] += int(share)
    return positions


def training_batch(rng, text, length, batch, pair_share, restate_share=0.0, stretch=0.7):
    """tokens [batch, length + 1], positions [batch, length], weights [batch, length], samples."""
    samples, positions = [], []
    for _ in range(batch):
        # Texts are sparse or dense: up to a third of the bytes are facts.
        most = max(2, min(96, int(0.35 * length / 28)))
        questions = max(1, min(24, int(0.5 * length / 55)))
        facts = max(2, int(round(np.exp(rng.uniform(np.log(2), np.log(most + 0.49))))))
        if rng.random() < 0.5:
            facts = max(facts, questions)
        restate, pairs = rng.random() < restate_share, 0
        if restate:
            facts = questions = max(2, int(length / 56 * rng.uniform(0.4, 0.95)))
        elif length >= 256 and rng.random() < pair_share:
            facts = max(facts, 4)
            pairs = max(1, facts // 4)
            questions = max(2, questions - questions // 3)
        while True:
            try:
                sample = make_sample(rng, text, length, facts, questions, pairs, restate=restate)
                break
            except ValueError:    # the text is too full, so try fewer facts
                questions, facts, pairs = max(1, questions - 1), max(2, facts - 1), min(pairs, 1)
        samples.append(sample)
        positions.append(stretched_positions(rng, length, sample.body)
                         if rng.random() < stretch else np.arange(length, dtype=np.int64))
    tokens = np.stack([s.tokens for s in samples])
    weights = np.stack([s.weights[1:] for s in samples])
    return tokens, np.stack(positions), weights, samples


def evaluation_facts(length):
    """How many facts a text of `length` bytes hides when a model is measured."""
    return min(32, max(4, length // 128))


def evaluation_sample(rng, text, length, questions=1, two_step=False, earliest_only=None):
    """One text and `questions` questions, each to be asked of the text alone.

    Text, one question and its answer are `length` bytes together."""
    facts = evaluation_facts(length)
    pairs = facts // 4 if two_step else 0
    questions = min(questions, pairs if two_step else facts)
    ask_bytes = QUESTION_BYTES + (22 if two_step else 0) + ANSWER_BYTES
    whole = length - 1 + ask_bytes * (questions - 1)
    return make_sample(rng, text, whole, facts, questions, pairs, earliest_only)


if __name__ == "__main__":
    held_out = split(read_kjv())[1]
    sample = evaluation_sample(np.random.default_rng(0), held_out, 768, 3, two_step=True)
    print(sample.tokens.tobytes().decode())
    print(sample.answers, sample.facts, len(sample.tokens))
