# SPDX-License-Identifier: Apache-2.0
"""A Llama of Hugging Face's format in numpy and float32: reads a prompt and gives each layer's keys (before RoPE) and
values, and goes on with a text over whatever rows it is given. It has the settings that SmolLM2 needs and no others.

  python3 bench/low_bits/model.py --model models/smollm2      goes on greedily with "The capital of France is"
"""
import argparse
import json
import struct
from pathlib import Path

import numpy as np


def tensors(path):
    """{name: float32 array} of a safetensors file of bfloat16 or float32."""
    raw = np.memmap(path, dtype=np.uint8, mode="r")
    size, = struct.unpack("<Q", raw[:8].tobytes())
    found = {}
    for name, about in json.loads(raw[8:8 + size].tobytes()).items():
        if name == "__metadata__":
            continue
        begin, end = about["data_offsets"]
        data = raw[8 + size + begin:8 + size + end]
        if about["dtype"] == "BF16":
            wide = data.view(np.uint16).astype(np.uint32) << 16
            found[name] = wide.view(np.float32).reshape(about["shape"])
        elif about["dtype"] == "F32":
            found[name] = data.view(np.float32).reshape(about["shape"]).copy()
        else:
            raise ValueError(f"{path}: {name} is of type {about['dtype']}; BF16 and F32 can be read")
    return found


def softmax(scores):
    """Along the last axis, in place."""
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    return scores


class Model:
    """Shapes: rows are [kv heads, rows, head_dim], activations [tokens, width]."""

    def __init__(self, folder):
        folder = Path(folder)
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        for key, only in (("attention_bias", False), ("mlp_bias", False), ("rope_scaling", None), ("hidden_act", "silu"),
                          ("tie_word_embeddings", True)):
            if config.get(key, only) != only:
                raise ValueError(f"{folder}: {key} is {config[key]}, and this model knows only {only}")
        self.layers = config["num_hidden_layers"]
        self.q_heads = config["num_attention_heads"]
        self.kv_heads = config["num_key_value_heads"]
        self.head_dim = config["hidden_size"] // self.q_heads
        self.epsilon = config["rms_norm_eps"]
        self.frequencies = float(config["rope_theta"]) ** (-np.arange(0, self.head_dim, 2) / self.head_dim)
        self.weights = tensors(folder / "model.safetensors")
        self.embeddings = self.weights["model.embed_tokens.weight"]

    def norm(self, x, name):
        return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + np.float32(self.epsilon)) * self.weights[name]

    def rope(self, rows, first=0):
        """Rows [heads, rows, head_dim] turned to their positions first, first + 1, ..."""
        angles = np.outer(np.arange(first, first + rows.shape[-2]), self.frequencies)
        cos, sin = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        low, high = np.split(rows, 2, axis=-1)
        return np.concatenate([low * cos - high * sin, high * cos + low * sin], axis=-1)

    def heads(self, x, layer, which):
        """[heads, tokens, head_dim] of one projection."""
        out = x @ self.weights[f"model.layers.{layer}.self_attn.{which}_proj.weight"].T
        return out.reshape(len(x), -1, self.head_dim).transpose(1, 0, 2)

    def attend(self, queries, keys, values, first):
        """Causal attention of queries [q heads, tokens, head_dim], of which the first stands at row `first` of the
        keys; [tokens, q heads * head_dim]."""
        tokens, group = queries.shape[1], self.q_heads // self.kv_heads
        out = np.empty((tokens, self.q_heads, self.head_dim), np.float32)
        for begin in range(0, tokens, 256):  # so that the scores stay small
            end = min(tokens, begin + 256)
            seen = first + end
            some = queries[:, begin:end].reshape(self.kv_heads, -1, self.head_dim) * np.float32(self.head_dim ** -0.5)
            scores = some @ keys[:, :seen].transpose(0, 2, 1)
            hidden = np.triu(np.full((end - begin, end - begin), -np.inf, np.float32), 1)
            scores.reshape(self.kv_heads, group, end - begin, seen)[..., first + begin:] += hidden
            mixed = softmax(scores) @ values[:, :seen]
            out[begin:end] = mixed.reshape(self.q_heads, end - begin, self.head_dim).transpose(1, 0, 2)
        return out.reshape(tokens, -1)

    def forward(self, ids, first=0, past=None, last_layer_rows_only=False, kept=None, streams=None, begin=None):
        """The residual stream after all layers. `past(layer)` gives (keys after RoPE, values) of the rows before `first`;
        `kept(layer, keys before RoPE, values)` gets what the layer's new tokens add. `streams` gets the residual stream in
        front of each layer, and `begin` = (layer, that stream) goes on from there."""
        start, x = begin or (0, self.embeddings[np.asarray(ids)])
        for layer in range(start, self.layers):
            name = f"model.layers.{layer}"
            if streams is not None:
                streams.append(x)
            y = self.norm(x, f"{name}.input_layernorm.weight")
            keys, values = self.heads(y, layer, "k"), self.heads(y, layer, "v")
            if kept:
                kept(layer, keys, values)
            if last_layer_rows_only and layer == self.layers - 1:
                return None
            queries, keys = self.rope(self.heads(y, layer, "q"), first), self.rope(keys, first)
            if past:
                past_keys, past_values = past(layer)
                keys, values = np.concatenate([past_keys, keys], axis=1), np.concatenate([past_values, values], axis=1)
            x = x + self.attend(queries, keys, values, first) @ self.weights[f"{name}.self_attn.o_proj.weight"].T
            y = self.norm(x, f"{name}.post_attention_layernorm.weight")
            gate = y @ self.weights[f"{name}.mlp.gate_proj.weight"].T
            gate *= y @ self.weights[f"{name}.mlp.up_proj.weight"].T / (1 + np.exp(-gate))
            x = x + gate @ self.weights[f"{name}.mlp.down_proj.weight"].T
        return x

    def log_probabilities(self, x):
        """[tokens, vocabulary], in float32."""
        logits = self.norm(x, "model.norm.weight") @ self.embeddings.T
        logits -= logits.max(axis=-1, keepdims=True)
        logits -= np.log(np.exp(logits).sum(axis=-1, keepdims=True, dtype=np.float64)).astype(np.float32)
        return logits

    def read(self, ids):
        """(keys before RoPE, values) of a prompt, [layers, kv heads, rows, head_dim] each."""
        keys = np.empty((self.layers, self.kv_heads, len(ids), self.head_dim), np.float32)
        values = np.empty_like(keys)

        def kept(layer, new_keys, new_values):
            keys[layer], values[layer] = new_keys, new_values

        self.forward(ids, last_layer_rows_only=True, kept=kept)
        return keys, values


def tokenizer(folder):
    from tokenizers import Tokenizer
    return Tokenizer.from_file(str(Path(folder) / "tokenizer.json"))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with config.json, model.safetensors, tokenizer.json")
    parser.add_argument("--prompt", default="The capital of France is")
    parser.add_argument("--tokens", type=int, default=8)
    arguments = parser.parse_args()
    model, words = Model(arguments.model), tokenizer(arguments.model)
    ids = words.encode(arguments.prompt).ids
    for _ in range(arguments.tokens):
        ids.append(int(model.log_probabilities(model.forward(ids)[-1:]).argmax()))
    print(words.decode(ids))


if __name__ == "__main__":
    main()
