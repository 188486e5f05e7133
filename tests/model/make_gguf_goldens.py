# SPDX-License-Identifier: Apache-2.0
"""Makes tests/model/goldens_gguf: GGUF files written and decoded by the `gguf` package of PyPI, against which
our reader is tested.

    python -m venv venv && venv/bin/pip install gguf safetensors numpy
    venv/bin/python tests/model/make_gguf_goldens.py

- blocks.safetensors: random blocks of each type, and the floats that the package decodes them to.
- NAME.gguf: the checkpoint NAME of tests/model/goldens as llama.cpp's converter would write it.
- quantised.gguf: a small random model with a different block type in each matrix, and a tokenizer's metadata;
  quantised.safetensors has tokens and the logits of a forward pass in float64 that is written out below,
  in the order of rows and with the rotation that llama.cpp has.
"""
import json
import pathlib

import numpy as np
from gguf import GGMLQuantizationType as Type
from gguf import GGUFReader, GGUFWriter, RopeScalingType
from gguf.constants import GGML_QUANT_SIZES
from gguf.quants import dequantize
from safetensors.numpy import save_file

HERE = pathlib.Path(__file__).parent
OUT = HERE / "goldens_gguf"
TYPES = [Type.F32, Type.F16, Type.BF16, Type.Q8_0, Type.Q4_0, Type.Q4_1, Type.Q4_K, Type.Q6_K]
# Where a block has its scales, as 16-bit floats.
SCALES = {Type.Q8_0: [0], Type.Q4_0: [0], Type.Q4_1: [0, 2], Type.Q4_K: [0, 2], Type.Q6_K: [208]}
CHECKPOINTS = ["all_biases", "qwen2_bias_gqa7", "tied_d64", "f16_d128", "llama3_scaling", "qwen3_norms"]
NAMES = {"self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
         "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
         "input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
         "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down"}


def random_blocks(random, kind, rows, columns, scale=1.0):
    """Bytes [rows, bytes of a row] of any bits, but with scales that are finite and about `scale`."""
    elements, size = GGML_QUANT_SIZES[kind]
    if kind in (Type.F32, Type.F16, Type.BF16):
        values = random.normal(0, scale, (rows, columns)).astype(np.float32)
        if kind == Type.BF16:
            return np.ascontiguousarray(values.view(np.uint16)[:, 1::2]).view(np.uint8)
        return values.astype(np.float16 if kind == Type.F16 else np.float32).view(np.uint8)
    blocks = random.integers(0, 256, (rows * columns // elements, size), dtype=np.uint8)
    for at in SCALES[kind]:
        numbers = random.normal(0, scale, len(blocks)).astype(np.float16)
        blocks[:, at:at + 2] = numbers.view(np.uint8).reshape(-1, 2)
    return blocks.reshape(rows, -1)


def make_blocks():
    random, tensors = np.random.default_rng(1), {}
    for kind in TYPES:
        data = random_blocks(random, kind, 6, 512)
        if kind not in (Type.F32, Type.F16, Type.BF16):
            # Scales at the ends of their range: zero, a subnormal number, the largest half.
            for row, bits in enumerate((0, 1, 0x7BFF)):
                for at in SCALES[kind]:
                    data[row, at:at + 2] = np.frombuffer(np.uint16(bits).tobytes(), np.uint8)
        tensors[kind.name + ".bytes"] = data
        tensors[kind.name + ".floats"] = np.ascontiguousarray(dequantize(data, kind), dtype=np.float32)
    save_file(tensors, OUT / "blocks.safetensors")


def permuted(rows, heads):
    """The order of q and k rows in files of architecture llama."""
    return rows.reshape(heads, 2, -1, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors_of(folder):
    """Arrays of the folder; bfloat16 as 16-bit words."""
    result = {}
    raw = (folder / "model.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for name, entry in json.loads(raw[8:8 + length]).items():
        if name == "__metadata__":
            continue
        begin, end = (8 + length + at for at in entry["data_offsets"])
        dtype = {"F32": np.float32, "F16": np.float16, "BF16": np.uint16}[entry["dtype"]]
        result[name] = (entry["dtype"], np.frombuffer(raw[begin:end], dtype).reshape(entry["shape"]))
    return result


def rotary_divisors(config, rope):
    """As llama.cpp's converter computes rope_freqs.weight."""
    half = config["head_dim"] // 2
    frequencies = rope["rope_theta"] ** (-np.arange(half) / half)
    wavelengths = 2 * np.pi / frequencies
    old, low, high = (rope[k] for k in ("original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    smooth = (old / wavelengths - low) / (high - low)
    blended = 1 / ((1 - smooth) / rope["factor"] + smooth)
    return np.where(wavelengths < old / high, 1.0,
                    np.where(wavelengths > old / low, rope["factor"], blended)).astype(np.float32)


def make_checkpoint(name):
    folder = HERE / "goldens" / name
    config = json.loads((folder / "config.json").read_text())
    architecture = config["model_type"]
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = rope.get("rope_theta", config.get("rope_theta"))
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    head_dim = config.get("head_dim") or config["hidden_size"] // heads
    out = GGUFWriter(OUT / f"{name}.gguf", architecture)
    out.add_block_count(config["num_hidden_layers"])
    out.add_context_length(config["max_position_embeddings"])
    out.add_embedding_length(config["hidden_size"])
    out.add_feed_forward_length(config["intermediate_size"])
    out.add_head_count(heads)
    out.add_head_count_kv(kv_heads)
    out.add_layer_norm_rms_eps(config["rms_norm_eps"])
    out.add_rope_freq_base(theta)
    out.add_key_length(head_dim)
    out.add_value_length(head_dim)
    out.add_eos_token_id(config["eos_token_id"])
    if architecture == "llama":
        out.add_vocab_size(config["vocab_size"])
        out.add_rope_dimension_count(head_dim)
    kind = rope.get("rope_type", "default")
    if kind == "linear":
        out.add_rope_scaling_type(RopeScalingType.LINEAR)
        out.add_rope_scaling_factor(rope["factor"])
    if kind == "llama3":
        out.add_rope_scaling_orig_ctx_len(rope["original_max_position_embeddings"])
        out.add_tensor("rope_freqs.weight", rotary_divisors(config, rope))
    for hf, (dtype, values) in tensors_of(folder).items():
        stem, ending = hf.rsplit(".", 1)
        if stem.startswith("model.layers."):
            _, _, layer, part = stem.split(".", 3)
            if architecture == "llama" and part in ("self_attn.q_proj", "self_attn.k_proj"):
                values = permuted(values, heads if part == "self_attn.q_proj" else kv_heads)
            own = f"blk.{layer}.{NAMES[part]}.{ending}"
        else:
            own = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}[stem] + ".weight"
        values = np.ascontiguousarray(values)
        if dtype == "BF16":
            out.add_tensor(own, values.view(np.uint8), raw_dtype=Type.BF16)
        else:
            out.add_tensor(own, values)
    finish(out)


def finish(out):
    out.write_header_to_file()
    out.write_kv_data_to_file()
    out.write_tensors_to_file()
    out.close()


HIDDEN, HEADS, KV_HEADS, DIM, INTERMEDIATE, VOCABULARY = 256, 4, 2, 64, 256, 64
# Scales such that weights have about the width that a model of this size needs.
MATRICES = {"token_embd": (VOCABULARY, HIDDEN, Type.Q6_K, 2e-4), "output": (VOCABULARY, HIDDEN, Type.Q4_K, 1e-3)}
LAYER = {"attn_q": (HEADS * DIM, HIDDEN, Type.Q4_K, 3e-4), "attn_k": (KV_HEADS * DIM, HIDDEN, Type.Q4_1, 8e-3),
         "attn_v": (KV_HEADS * DIM, HIDDEN, Type.Q8_0, 5e-4), "attn_output": (HIDDEN, HEADS * DIM, Type.Q4_0, 8e-3),
         "ffn_gate": (INTERMEDIATE, HIDDEN, Type.Q6_K, 3e-5), "ffn_up": (INTERMEDIATE, HIDDEN, Type.F16, 0.05),
         "ffn_down": (HIDDEN, INTERMEDIATE, Type.BF16, 0.05)}


def make_quantised():
    random = np.random.default_rng(2)
    path = OUT / "quantised.gguf"
    out = GGUFWriter(path, "llama")
    out.add_block_count(1)
    out.add_context_length(512)
    out.add_embedding_length(HIDDEN)
    out.add_feed_forward_length(INTERMEDIATE)
    out.add_head_count(HEADS)
    out.add_head_count_kv(KV_HEADS)
    out.add_layer_norm_rms_eps(1e-5)
    out.add_rope_freq_base(10000.0)
    out.add_tokenizer_model("gpt2")
    out.add_tokenizer_pre("smollm")
    out.add_token_list(["<|end|>"] + [f"t{i}" for i in range(1, VOCABULARY - 1)] + ["Ġé"])
    out.add_token_types([3] + [1] * (VOCABULARY - 1))
    out.add_token_merges(["t 1", "Ġ é"])
    out.add_bos_token_id(1)
    out.add_eos_token_id(0)
    out.add_eot_token_id(5)
    out.add_add_bos_token(False)
    out.add_chat_template("{{ messages }}")
    for name, (rows, columns, kind, scale) in MATRICES.items():
        out.add_tensor(name + ".weight", random_blocks(random, kind, rows, columns, scale), raw_dtype=kind)
    for name, (rows, columns, kind, scale) in LAYER.items():
        out.add_tensor(f"blk.0.{name}.weight", random_blocks(random, kind, rows, columns, scale), raw_dtype=kind)
    for name in ("output_norm", "blk.0.attn_norm", "blk.0.ffn_norm"):
        out.add_tensor(name + ".weight", (1 + 0.2 * random.normal(size=HIDDEN)).astype(np.float32))
    finish(out)

    weights = {t.name.removesuffix(".weight"): dequantize(t.data, t.tensor_type).astype(np.float64)
               for t in GGUFReader(path).tensors}
    tokens = random.integers(0, VOCABULARY, 40)
    logits = forward(weights, tokens)
    print(f"quantised: logits' standard deviation {logits.std():.2f}")
    save_file({"tokens": tokens.astype(np.int64), "logits": logits.astype(np.float32)}, OUT / "quantised.safetensors")


def normed(x, weight):
    return x / np.sqrt((x * x).mean(-1, keepdims=True) + 1e-5) * weight


def rotated(x):
    """[tokens, heads, DIM]: neighbouring channels are a pair, as in llama.cpp."""
    angles = np.arange(len(x))[:, None, None] * 10000.0 ** (-np.arange(0, DIM, 2) / DIM)
    even, odd = x[..., ::2], x[..., 1::2]
    return np.stack([even * np.cos(angles) - odd * np.sin(angles),
                     odd * np.cos(angles) + even * np.sin(angles)], -1).reshape(x.shape)


def forward(w, tokens):
    count = len(tokens)
    x = w["token_embd"][tokens]
    y = normed(x, w["blk.0.attn_norm"])
    q = rotated((y @ w["blk.0.attn_q"].T).reshape(count, HEADS, DIM))
    k = rotated((y @ w["blk.0.attn_k"].T).reshape(count, KV_HEADS, DIM)).repeat(HEADS // KV_HEADS, 1)
    v = (y @ w["blk.0.attn_v"].T).reshape(count, KV_HEADS, DIM).repeat(HEADS // KV_HEADS, 1)
    scores = np.einsum("qhd,khd->hqk", q, k) / np.sqrt(DIM)
    scores[:, ~np.tril(np.ones((count, count), bool))] = -np.inf
    shares = np.exp(scores - scores.max(-1, keepdims=True))
    shares /= shares.sum(-1, keepdims=True)
    x = x + np.einsum("hqk,khd->qhd", shares, v).reshape(count, -1) @ w["blk.0.attn_output"].T
    y = normed(x, w["blk.0.ffn_norm"])
    gate = y @ w["blk.0.ffn_gate"].T
    x = x + (gate / (1 + np.exp(-gate)) * (y @ w["blk.0.ffn_up"].T)) @ w["blk.0.ffn_down"].T
    return normed(x, w["output_norm"]) @ w["output"].T


def main():
    OUT.mkdir(exist_ok=True)
    make_blocks()
    for name in CHECKPOINTS:
        make_checkpoint(name)
    make_quantised()


if __name__ == "__main__":
    main()
