#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes llama2.c's checkpoint and tokenizer from a Hugging Face folder of a Llama (config.json, *.safetensors in
BF16 or F32, tokenizer.json with byte-level BPE).

  convert.py FOLDER CHECKPOINT.bin TOKENIZER.bin

The engine reads what this script says of the model, and no more: it has one base of RoPE, which the edited program
takes by -r (the script prints it), and it merges tokens without splitting the text into words first, so its tokens
are those of the model's own tokenizer for plain ASCII text at best. What it cannot compute is refused.
"""
import argparse
import json
import struct
import sys
from pathlib import Path


class Refused(Exception):
    pass


def byte_of_character():
    """Byte-level BPE writes each byte as a printable character; this is {character: byte}."""
    plain = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


class Weights:
    """The tensors of a folder as little-endian float32, read when they are asked for."""

    def __init__(self, folder):
        self.found = {}
        for path in sorted(folder.glob("*.safetensors")):
            with open(path, "rb") as file:
                (header_bytes,) = struct.unpack("<Q", file.read(8))
                header = json.loads(file.read(header_bytes))
            header.pop("__metadata__", None)
            self.found |= {name: (path, 8 + header_bytes, entry) for name, entry in header.items()}

    def read(self, name, shape):
        if name not in self.found:
            raise Refused(f"no *.safetensors has the tensor {name}")
        path, start, entry = self.found[name]
        if entry["shape"] != list(shape) or entry["dtype"] not in ("BF16", "F32"):
            raise Refused(f"{path}: {name} has {entry['dtype']} {entry['shape']}, must have BF16 or F32 {list(shape)}")
        first, last = entry["data_offsets"]
        with open(path, "rb") as file:
            file.seek(start + first)
            data = file.read(last - first)
        count = 1
        for size in shape:
            count *= size
        if len(data) != count * (2 if entry["dtype"] == "BF16" else 4):
            raise Refused(f"{path}: {name} has {len(data)} bytes, which its shape {list(shape)} does not fit")
        if entry["dtype"] == "F32":
            return data
        wide = bytearray(2 * len(data))  # bfloat16 is the upper half of a float32
        wide[2::4] = data[0::2]
        wide[3::4] = data[1::2]
        return bytes(wide)


def interleaved(data, heads, head_dim, columns):
    """Rows of q or k for an engine that rotates channels 2i and 2i + 1, from rows for one that rotates i and
    i + head_dim / 2."""
    row = 4 * columns
    order = [head * head_dim + half * (head_dim // 2) + i
             for head in range(heads) for i in range(head_dim // 2) for half in range(2)]
    return b"".join(data[row * number:row * (number + 1)] for number in order)


def checked(config):
    wanted = {"model_type": ["llama"], "hidden_act": ["silu"], "attention_bias": [False, None],
              "mlp_bias": [False, None], "rope_scaling": [None], "quantization_config": [None],
              "rms_norm_eps": [1e-5]}
    for key, values in wanted.items():
        if config.get(key) not in values:
            raise Refused(f"config.json: {key} is {config.get(key)}, the engine computes {values[0]} only")
    head_dim = config["hidden_size"] // config["num_attention_heads"]
    if config.get("head_dim", head_dim) != head_dim:
        raise Refused(f"config.json: head_dim is {config['head_dim']}, the engine's is hidden_size / heads = {head_dim}")
    return head_dim


def write_checkpoint(folder, config, out):
    dim, hidden = config["hidden_size"], config["intermediate_size"]
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads", heads)
    words, tokens = config["vocab_size"], config["max_position_embeddings"]
    head_dim = checked(config)
    shared = config.get("tie_word_embeddings", False)
    weights = Weights(folder)
    # In the engine's order; the number of rows of q and k says that they are interleaved.
    each_layer = [("input_layernorm", (dim,), 0), ("self_attn.q_proj", (dim, dim), heads),
                  ("self_attn.k_proj", (kv_heads * head_dim, dim), kv_heads),
                  ("self_attn.v_proj", (kv_heads * head_dim, dim), 0), ("self_attn.o_proj", (dim, dim), 0),
                  ("post_attention_layernorm", (dim,), 0), ("mlp.gate_proj", (hidden, dim), 0),
                  ("mlp.down_proj", (dim, hidden), 0), ("mlp.up_proj", (hidden, dim), 0)]
    with open(out, "wb") as file:
        # A negative number of words says that the classifier has weights of its own.
        file.write(struct.pack("<7i", dim, hidden, layers, heads, kv_heads, words if shared else -words, tokens))
        file.write(weights.read("model.embed_tokens.weight", (words, dim)))
        for name, shape, rotated in each_layer:
            for layer in range(layers):
                data = weights.read(f"model.layers.{layer}.{name}.weight", shape)
                file.write(interleaved(data, rotated, head_dim, dim) if rotated else data)
        file.write(weights.read("model.norm.weight", (dim,)))
        file.write(bytes(4 * tokens * head_dim))  # tables of RoPE, which the engine skips
        if not shared:
            file.write(weights.read("lm_head.weight", (words, dim)))


def write_tokenizer(folder, words, out):
    tokenizer = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, bytes_of = tokenizer["model"], byte_of_character()
    if model.get("type") != "BPE" or model.get("byte_fallback"):
        raise Refused("tokenizer.json: must be byte-level BPE")
    special = {entry["id"]: entry["content"].encode() for entry in tokenizer["added_tokens"]}
    pieces = dict(special)
    for text, number in model["vocab"].items():
        if number not in pieces:
            pieces[number] = bytes(bytes_of[character] for character in text)
    # The engine merges the pair whose result has the highest score: the earliest merge.
    never = -2e10  # below every score that the engine considers
    scores = {}
    for rank, pair in enumerate(model["merges"]):
        left, right = pair.split(" ") if isinstance(pair, str) else pair
        scores.setdefault(model["vocab"][left + right], -1.0 - rank)
    with open(out, "wb") as file:
        file.write(struct.pack("<i", max(map(len, pieces.values()))))
        for number in range(words):
            piece = pieces.get(number, b"?")
            file.write(struct.pack("<fi", scores.get(number, never), len(piece)) + piece)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("checkpoint", type=Path)
    parser.add_argument("tokenizer", type=Path)
    arguments = parser.parse_args()
    try:
        config = json.loads((arguments.folder / "config.json").read_text(encoding="utf-8"))
        write_tokenizer(arguments.folder, config["vocab_size"], arguments.tokenizer)
        write_checkpoint(arguments.folder, config, arguments.checkpoint)
    except (OSError, Refused) as why:
        sys.exit(f"{arguments.folder}: not converted: {why}")
    except (ValueError, KeyError, struct.error) as why:
        sys.exit(f"{arguments.folder}: not converted: {type(why).__name__}: {why}")
    theta = config.get("rope_theta", 10000.0)
    print(f"{arguments.checkpoint}, {arguments.tokenizer}: run them with -r {theta:g}")


if __name__ == "__main__":
    main()
