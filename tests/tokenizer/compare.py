# SPDX-License-Identifier: Apache-2.0
"""Compares examples/tokenize with the libraries whose tokens it promises, on random mixed texts.

    python -m venv venv && venv/bin/pip install tokenizers sentencepiece
    venv/bin/python tests/tokenizer/compare.py --tokenize build/release/examples/tokenize --model FOLDER

A folder with tokenizer.json is compared with PyPI `tokenizers`, one with tokenizer.model with PyPI
`sentencepiece`: the tokens of every text, and the text of every list of tokens. Broken UTF-8 goes to
them through Python's decode(errors="replace"), because they take no bytes.

Not counted: texts with two unigram segmentations that are equally likely, and texts whose normal form
`tokenizers` takes from tables that are older than Python's. And where byte tokens ("<0xE2>") in a row are not UTF-8, `tokenizers` replaces every byte of the
row; we and SentencePiece replace what is broken and keep the characters that are whole.
"""
import argparse
import json
import pathlib
import random
import subprocess
import tempfile
import time
import unicodedata

import mixed_text
import tokenizers


def ties(processor, text):
    """Whether the two best unigram segmentations are equally likely, up to rounding: versions of the
    library differ in which of them they take."""
    try:
        best = processor.nbest_encode(text, nbest_size=2)
    except RuntimeError:  # a BPE model
        return False
    scores = [sum(map(processor.get_score, ids)) for ids in best]
    return len(scores) == 2 and abs(scores[0] - scores[1]) < 1e-3


def other_form(peer, text):
    """Whether `tokenizers` does not know a combining mark that Python's unicodedata knows."""
    return isinstance(peer.normalizer, tokenizers.normalizers.NFC) and \
        peer.normalizer.normalize_str(text) != unicodedata.normalize("NFC", text)


def peer_of(folder):
    if (folder / "tokenizer.json").exists():
        peer = tokenizers.Tokenizer.from_file(str(folder / "tokenizer.json"))
        return (lambda text: peer.encode(text).ids), (lambda ids: peer.decode(ids)), peer.get_vocab_size(), (lambda text: other_form(peer, text))
    import sentencepiece
    peer = sentencepiece.SentencePieceProcessor(model_file=str(folder / "tokenizer.model"))
    bos = [peer.bos_id()] if peer.bos_id() >= 0 else []
    return (lambda text: bos + peer.encode(text)), (lambda ids: peer.decode(ids)), peer.get_piece_size(), (lambda text: ties(peer, text))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenize", required=True, metavar="PROGRAM")
    parser.add_argument("--model", required=True, type=pathlib.Path, metavar="FOLDER")
    parser.add_argument("--texts", type=int, default=100_000)
    parser.add_argument("--seed", type=int, default=1)
    arguments = parser.parse_args()
    encode, decode, vocabulary, tie = peer_of(arguments.model)
    json_file = arguments.model / "tokenizer.json"
    fallback = json_file.exists() and json.loads(json_file.read_text())["model"].get("byte_fallback")
    # Without tokenizer.json, special tokens are SentencePiece's own business: it never parses them.
    plain = [] if json_file.exists() else ["--plain"]

    texts = list(mixed_text.texts(arguments.texts, arguments.seed))
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"".join(text + b"\0" for text in texts))
        file.flush()
        began = time.time()
        lines = subprocess.run([arguments.tokenize, "--model", arguments.model, "--file", file.name, "--null-data", *plain],
                               check=True, stdout=subprocess.PIPE).stdout.splitlines()
        seconds = time.time() - began
    assert len(lines) == len(texts), (len(lines), len(texts))
    wrong = tokens = tied = 0
    for text, line in zip(texts, lines):
        ours, theirs = json.loads(line), encode(text.decode(errors="replace"))
        tokens += len(theirs)
        if ours != theirs and tie(text.decode(errors="replace")):
            tied += 1
        elif ours != theirs:
            wrong += 1
            if wrong <= 5:
                print("tokens differ:", text, "\n  ours  ", ours, "\n  theirs", theirs)

    rng = random.Random(arguments.seed)
    lists = [json.loads(line) for line in lines[::2]]
    lists += [[rng.randrange(vocabulary) for _ in range(rng.randrange(1, 12))] for _ in range(len(texts) // 20)]
    with tempfile.NamedTemporaryFile("w") as file:
        file.writelines(json.dumps(ids) + "\n" for ids in lists)
        file.flush()
        decoded = subprocess.run([arguments.tokenize, "--model", arguments.model, "--file", file.name, "--decode"],
                                 check=True, stdout=subprocess.PIPE).stdout.splitlines()
    wrong_texts = broken_rows = 0
    for ids, line in zip(lists, decoded, strict=True):
        ours, theirs = json.loads(line), decode(ids)
        if ours != theirs and "\ufffd" in theirs and fallback:
            broken_rows += 1
        elif ours != theirs:
            wrong_texts += 1
            if wrong_texts <= 5:
                print("texts differ:", ids, "\n  ours  ", repr(ours), "\n  theirs", repr(theirs))
    size = sum(map(len, texts))
    print(f"{arguments.model.name}: {len(texts)} texts, {size} bytes, {tokens} tokens, {wrong} differ{f' and {tied} are not counted' if tied else ''}; {len(lists)} lists decoded, "
          f"{wrong_texts} differ{f' and {broken_rows} have broken rows of bytes' if broken_rows else ''}; {size / seconds / 1e6:.1f} MB/s with loading")
    return wrong + wrong_texts > 0


if __name__ == "__main__":
    raise SystemExit(main())
