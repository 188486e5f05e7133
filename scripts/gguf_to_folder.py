#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Writes a GGUF file of a Llama model as a Hugging Face folder with weights in bfloat16.

usage: gguf_to_folder.py FILE.gguf FOLDER

A step of scripts/fetch-model, which has checked the file's SHA-256. The file is therefore trusted, and only
what the models of that command contain is read: llama architecture, F32, Q8_0 and Q4_1, byte-level BPE.
"""
import json
import pathlib
import struct
import sys

import numpy as np

# Metadata values of a fixed size: GGUF's number of the type -> struct's letter.
SCALARS = dict(enumerate("BbHhIif?")) | {10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
# What follows the name of a pre-tokenizer in tokenizer.json.
PRE_TOKENIZERS = {"smollm": [
    {"type": "Digits", "individual_digits": True},
    {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": True}]}
CONTROL_TOKEN = 3
HF_NAMES = {"attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
            "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
            "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
            "token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}


class Reader:
    """Takes values from the front of the file."""

    def __init__(self, data):
        self.data, self.at = data, 0

    def take(self, letters):
        values = struct.unpack_from("<" + letters, self.data, self.at)
        self.at += struct.calcsize("<" + letters)
        return values[0] if len(values) == 1 else values

    def text(self):
        size = self.take("Q")
        self.at += size
        return bytes(self.data[self.at - size:self.at]).decode()

    def value(self, kind):
        if kind == STRING:
            return self.text()
        if kind == ARRAY:
            kind, count = self.take("IQ")
            return [self.value(kind) for _ in range(count)]
        return self.take(SCALARS[kind])


def read_gguf(path):
    """Returns metadata and tensors {name: (type, shape, array of bytes)}; shapes as numpy has them."""
    data = np.memmap(path, dtype=np.uint8, mode="r")
    reader = Reader(data)
    magic, version, tensors, keys = reader.take("4sIQQ")
    if magic != b"GGUF" or version != 3:
        sys.exit(f"{path}: not a GGUF file of version 3")
    meta = {}
    for _ in range(keys):
        name = reader.text()
        meta[name] = reader.value(reader.take("I"))
    entries = []
    for _ in range(tensors):
        name = reader.text()
        shape = [reader.take("Q") for _ in range(reader.take("I"))][::-1]
        entries.append((name, shape, *reader.take("IQ")))
    alignment = meta.get("general.alignment", 32)
    begin = -(-reader.at // alignment) * alignment
    return meta, {name: (kind, shape, data[begin + offset:]) for name, shape, kind, offset in entries}


def floats(kind, shape, data):
    """The values of a tensor as float32."""
    count = int(np.prod(shape))
    if kind == 0:  # F32
        return data[:4 * count].view("<f4").reshape(shape)
    if kind == 3:  # Q4_1: scale, minimum and 32 numbers of 4 bits; the low halves of the bytes come first
        blocks = data[:count // 32 * 20].reshape(-1, 20)
        scale, minimum = blocks[:, :4].copy().view("<f2").astype(np.float32).T[:, :, None]
        numbers = np.concatenate([blocks[:, 4:] & 15, blocks[:, 4:] >> 4], axis=1)
        return (scale * numbers + minimum).astype(np.float32).reshape(shape)
    if kind == 8:  # Q8_0: scale and 32 numbers of 8 bits
        blocks = data[:count // 32 * 34].reshape(-1, 34)
        scale = blocks[:, :2].copy().view("<f2").astype(np.float32)
        return (scale * blocks[:, 2:].view(np.int8)).astype(np.float32).reshape(shape)
    sys.exit(f"tensor type {kind} is not one of F32, Q4_1, Q8_0")


def hf_name(name):
    stem = name.removesuffix(".weight")
    if not stem.startswith("blk."):
        return HF_NAMES[stem] + ".weight"
    _, layer, part = stem.split(".")
    return f"model.layers.{layer}.{HF_NAMES[part]}.weight"


def in_halves(rows, heads):
    """Undoes the order of GGUF's q and k rows: llama.cpp rotates neighbouring channels of a head, Hugging
    Face's models rotate channel i with channel i + head_dim / 2."""
    return rows.reshape(heads, -1, 2, rows.shape[1]).swapaxes(1, 2).reshape(rows.shape)


def bfloat16_bytes(values):
    """Rounds to the nearest, ties to even. The weights are finite."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype("<u2").tobytes()


def write_weights(path, tensors, q_heads, kv_heads):
    header, end = {"__metadata__": {"format": "pt"}}, 0
    for name, (_, shape, _) in tensors.items():
        begin, end = end, end + 2 * int(np.prod(shape))
        header[hf_name(name)] = {"dtype": "BF16", "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    with open(path, "wb") as out:
        out.write(struct.pack("<Q", len(text)) + text)
        for done, (name, tensor) in enumerate(tensors.items(), 1):
            values = floats(*tensor)
            if ".attn_q." in name or ".attn_k." in name:
                values = in_halves(values, q_heads if ".attn_q." in name else kv_heads)
            out.write(bfloat16_bytes(values))
            if sys.stdout.isatty() or done == len(tensors):
                print(f"\r  {done} of {len(tensors)} tensors", end="", flush=True)
    print()


def config_of(meta, tied):
    number = {key.removeprefix("llama."): value for key, value in meta.items() if key.startswith("llama.")}
    return {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
        "attention_bias": False, "mlp_bias": False, "tie_word_embeddings": tied,
        "vocab_size": number["vocab_size"], "hidden_size": number["embedding_length"],
        "intermediate_size": number["feed_forward_length"], "num_hidden_layers": number["block_count"],
        "num_attention_heads": number["attention.head_count"],
        "num_key_value_heads": number["attention.head_count_kv"],
        "max_position_embeddings": number["context_length"], "rope_theta": number["rope.freq_base"],
        "rope_scaling": None,
        # GGUF holds 1e-5 as a float; seven digits give the number that was meant.
        "rms_norm_eps": float(f"{number['attention.layer_norm_rms_epsilon']:.7g}"),
        "torch_dtype": "bfloat16", **token_ids(meta)}


def token_ids(meta):
    return {f"{short}_token_id": meta[f"tokenizer.ggml.{long}_token_id"]
            for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"))}


def tokenizer_of(meta):
    tokens, kinds = meta["tokenizer.ggml.tokens"], meta["tokenizer.ggml.token_type"]
    added = [{"id": i, "content": tokens[i], "single_word": False, "lstrip": False, "rstrip": False,
              "normalized": False, "special": True} for i, kind in enumerate(kinds) if kind == CONTROL_TOKEN]
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": added, "normalizer": None,
        "pre_tokenizer": {"type": "Sequence", "pretokenizers": PRE_TOKENIZERS[meta["tokenizer.ggml.pre"]]},
        "post_processor": None,
        "decoder": {"type": "ByteLevel", "add_prefix_space": True, "trim_offsets": True, "use_regex": True},
        "model": {"type": "BPE", "dropout": None, "unk_token": None, "continuing_subword_prefix": None,
                  "end_of_word_suffix": None, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False,
                  "vocab": {token: i for i, token in enumerate(tokens)}, "merges": meta["tokenizer.ggml.merges"]}}


def special_tokens(meta):
    tokens = meta["tokenizer.ggml.tokens"]
    return {f"{short}_token": tokens[meta[f"tokenizer.ggml.{long}_token_id"]]
            for short, long in (("bos", "bos"), ("eos", "eos"), ("pad", "padding"), ("unk", "unknown"))}


def main():
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    source, folder = sys.argv[1], pathlib.Path(sys.argv[2])
    meta, tensors = read_gguf(source)
    if meta["general.architecture"] != "llama" or meta["tokenizer.ggml.model"] != "gpt2":
        sys.exit(f"{source}: not a llama model with byte-level BPE")
    folder.mkdir()
    config = config_of(meta, tied="output.weight" not in tensors)
    tokenizer = tokenizer_of(meta)

    def write(name, content):
        (folder / name).write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")

    write("config.json", config)
    write("generation_config.json", token_ids(meta))
    write("tokenizer.json", tokenizer)
    write("special_tokens_map.json", special_tokens(meta))
    write("tokenizer_config.json", {
        # The class that takes tokenizer.json as it is; model classes would choose a pre-tokenizer themselves.
        "tokenizer_class": "PreTrainedTokenizerFast", "add_prefix_space": False,
        "clean_up_tokenization_spaces": False, "model_max_length": config["max_position_embeddings"],
        **special_tokens(meta),
        "added_tokens_decoder": {str(token["id"]): {key: token[key] for key in token if key != "id"}
                                 for token in tokenizer["added_tokens"]},
        "chat_template": meta["tokenizer.chat_template"]})
    write_weights(folder / "model.safetensors", tensors, config["num_attention_heads"],
                  config["num_key_value_heads"])


if __name__ == "__main__":
    main()
