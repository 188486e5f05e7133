# SPDX-License-Identifier: Apache-2.0
"""Makes tests/tokenizer/goldens/neighbours.json: tokens that only the files beside tokenizer.json name, as transformers finds them.

    python -m venv venv && venv/bin/pip install transformers
    venv/bin/python tests/tokenizer/make_neighbour_goldens.py

Each case has the folder of a tokenizer among the goldens, the files that lie beside it, and the tokens of each text.
"""
import json
import os
import pathlib
import shutil
import tempfile

os.environ["TRANSFORMERS_VERBOSITY"] = "error"
from transformers import AutoTokenizer  # noqa: E402

GOLDENS = pathlib.Path(__file__).parent / "goldens"
TEXTS = ["a <extra> b<more>c", "<extra><extra> <more>", "the <more>the", "no such token", "x <EXTRA> <extra > é<extra>ü",
         "a   <extra>   b", "<|endoftext|>a<extra>", "</s>the<s>"]
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast"}


def token(content, **flags):
    return {"content": content, "lstrip": False, "rstrip": False, "normalized": False, "single_word": False, **flags}


def typed(content, **flags):
    """As it is written in lists and under names."""
    return {"__type": "AddedToken", **token(content, **flags)}


def plain(**more):
    return {"tokenizer_config.json": {**PLAIN, **more}}


def numbered(tokens):
    return plain(added_tokens_decoder=tokens)


FILES = {
    "a number beyond the last": numbered({"700": token("<extra>", special=True)}),
    "two, by their numbers": numbered({"701": token("<extra>", special=True), "700": token("<more>", special=False)}),
    "white space belongs to it": numbered({"700": token("<extra>", special=True, lstrip=True, rstrip=True)}),
    "a whole word": numbered({"700": token("<extra>", special=True, single_word=True)}),
    "additional special tokens": plain(additional_special_tokens=["<extra>", "<more>"]),
    "additional special tokens as objects": plain(additional_special_tokens=[typed("<more>"), typed("<extra>", rstrip=True)]),
    "an end of text": plain(eos_token="<extra>"),
    "an end of text as an object": plain(eos_token=typed("<extra>", lstrip=True)),
    "several names of one": plain(pad_token="<more>", eos_token="<extra>", bos_token="<extra>"),
    "a token of the vocabulary": plain(eos_token="th"),
    "a name of its own": plain(image_token="<extra>"),
    "special_tokens_map.json alone": {"special_tokens_map.json": {"eos_token": "<extra>", "additional_special_tokens": ["<more>"]}},
    "special_tokens_map.json beside": {**plain(), "special_tokens_map.json": {"pad_token": typed("<extra>")}},
    "added_tokens.json": {**plain(), "added_tokens.json": {"<extra>": 700}},
    "added_tokens.json by numbers": {**plain(), "added_tokens.json": {"<more>": 701, "<extra>": 700}},
    "added_tokens.json with a gap": {**plain(), "added_tokens.json": {"<extra>": 710, "<more>": 705}},
    "added_tokens.json and a name": {**plain(eos_token="<extra>"), "added_tokens.json": {"<more>": 700, "<extra>": 701}},
    "the map before the config": {**plain(eos_token="<extra>", pad_token="<more>"), "special_tokens_map.json": {"eos_token": "<more>"}},
    "numbers, and older files": {**numbered({"700": token("<extra>", special=True)}), "special_tokens_map.json": {"pad_token": "<more>"},
                                 "added_tokens.json": {"<more>": 700}},
    "lists of both": {**plain(additional_special_tokens=["<extra>"]), "special_tokens_map.json": {"additional_special_tokens": ["<more>"]}},
    "one list, and an extra one": {**plain(additional_special_tokens=["<extra>"]), "special_tokens_map.json": {"extra_special_tokens": ["<more>"]}},
    "a list under both names": plain(additional_special_tokens=["<more>"], extra_special_tokens=["<extra>"]),
    "names in a list": {**plain(extra_special_tokens={"image_token": "<extra>"}), "special_tokens_map.json": {"additional_special_tokens": ["<more>"]}},
    "an empty list": {**plain(additional_special_tokens=[]), "special_tokens_map.json": {"additional_special_tokens": ["<more>"]}},
    "flags": plain(add_bos_token=True, add_prefix_space=None, eos_token=None, pad_token="<more>"),
}


def tokens_of(base, files):
    with tempfile.TemporaryDirectory() as name:
        folder = pathlib.Path(name)
        shutil.copy(GOLDENS / base / "tokenizer.json", folder)
        (folder / "config.json").write_text(json.dumps({"model_type": "llama", "architectures": ["LlamaForCausalLM"]}))
        for file, contents in files.items():
            (folder / file).write_text(json.dumps(contents))
        tokenizer = AutoTokenizer.from_pretrained(folder)
        return [tokenizer(text)["input_ids"] for text in TEXTS]


def main():
    cases = [{"name": name, "base": base, "files": files, "tokens": tokens_of(base, files)}
             for base in ("smollm", "llama3", "llama2", "metaspace") for name, files in FILES.items()]
    text = json.dumps({"texts": TEXTS, "cases": cases}, ensure_ascii=False, separators=(",", ":"))
    (GOLDENS / "neighbours.json").write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
