# SPDX-License-Identifier: Apache-2.0
"""Makes tests/model/goldens: tiny random checkpoints of the Llama family, each with the logits
that PyTorch transformers computes for it, against which the reference model is tested.

    python -m venv venv && venv/bin/pip install torch transformers
    venv/bin/python tests/model/make_goldens.py [--out tests/model/goldens] [--only NAME]

Each folder holds config.json and the weights, as a download from Hugging Face would, and
golden.safetensors with `tokens` [150] and `logits` [150, vocabulary]: attention "eager", float32,
the whole prompt at once. The logits come from the folder as it was written, so that whatever
spelling config.json uses is one that transformers reads too.

Weights are drawn far wider than a trained model's, so that logits spread over several units and
attention is far from uniform: a wrong rotary base, a swapped head or a lost bias moves logits by
thousands of times the tests' tolerance.
"""
import argparse
import json
import pathlib
import shutil

import torch
import transformers
from safetensors.torch import save_file
from transformers import LlamaConfig, MistralConfig, Qwen2Config, Qwen3Config

TOKENS = 150
COMMON = dict(
    vocab_size=64, num_hidden_layers=2, intermediate_size=56, max_position_embeddings=512,
    rms_norm_eps=1e-5, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
)
PLAIN = {"rope_type": "default", "rope_theta": 10000.0}


def old_spelling(config):
    """config.json as transformers 4 wrote it: theta as a key of its own, scaling with the key `type`."""
    rope = config.pop("rope_parameters")
    kind = rope.pop("rope_type")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = {"type": kind, **rope} if kind != "default" else None
    config["torch_dtype"] = config.pop("dtype")
    return config


def without(*keys):
    def edit(config):
        for key in keys:
            config.pop(key)
        return config
    return edit


# name: (config class, settings, how to save, edit of config.json)
CASES = {
    "mha_d64": (LlamaConfig, dict(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=2, head_dim=64,
        rope_parameters=PLAIN), {}, None),
    "gqa2_d80": (LlamaConfig, dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=80,
        rope_parameters={"rope_type": "default", "rope_theta": 500000.0}), {}, old_spelling),
    "gqa7_d64": (LlamaConfig, dict(
        hidden_size=28, num_attention_heads=14, num_key_value_heads=2, head_dim=64,
        rope_parameters=PLAIN), {}, None),
    # config.json has no head_dim: it is hidden_size / num_attention_heads.
    "tied_d64": (LlamaConfig, dict(
        hidden_size=128, num_attention_heads=2, num_key_value_heads=1,
        tie_word_embeddings=True, rope_parameters=PLAIN),
        dict(dtype=torch.bfloat16), without("head_dim")),
    "all_biases": (LlamaConfig, dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        attention_bias=True, mlp_bias=True, rope_parameters=PLAIN), {}, None),
    "qwen2_bias_gqa7": (Qwen2Config, dict(
        hidden_size=35, num_attention_heads=7, num_key_value_heads=1, head_dim=64,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        {}, None),
    "qwen2_window_upper_layers": (Qwen2Config, dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        use_sliding_window=True, sliding_window=24, max_window_layers=1,
        rope_parameters=PLAIN), {}, lambda c: without("layer_types")(old_spelling(c))),
    # Each head's queries and keys are normalised; head_dim is not hidden_size / num_attention_heads.
    "qwen3_norms": (Qwen3Config, dict(
        hidden_size=32, num_attention_heads=6, num_key_value_heads=2, head_dim=32,
        tie_word_embeddings=True, rope_parameters={"rope_type": "default", "rope_theta": 1e6}),
        {}, None),
    # Of the 32 frequencies some are unchanged, some are blended and some are divided by 8.
    "llama3_scaling": (LlamaConfig, dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        rope_parameters={"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0,
                         "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                         "original_max_position_embeddings": 128}), {}, None),
    "linear_scaling": (LlamaConfig, dict(
        hidden_size=32, num_attention_heads=2, num_key_value_heads=1, head_dim=80,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 4.0}),
        {}, old_spelling),
    "mistral_window": (MistralConfig, dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        sliding_window=48, rope_parameters=PLAIN), {}, None),
    "sharded_bf16": (LlamaConfig, dict(
        hidden_size=48, num_attention_heads=4, num_key_value_heads=2, head_dim=64,
        intermediate_size=96, rope_parameters=PLAIN),
        dict(dtype=torch.bfloat16, max_shard_size="60KB"), None),
    "f16_d128": (LlamaConfig, dict(
        hidden_size=32, num_attention_heads=4, num_key_value_heads=1, head_dim=128,
        rope_parameters={"rope_type": "linear", "rope_theta": 10000.0, "factor": 2.0}),
        dict(dtype=torch.float16), None),
}


def randomise(model):
    for name, p in sorted(model.named_parameters()):
        if "norm" in name:
            p.data = 1 + 0.2 * torch.randn_like(p)
        elif name.endswith("bias"):
            p.data = 0.3 * torch.randn_like(p)
        elif "embed" in name:
            p.data = 0.3 * torch.randn_like(p)
        elif "q_proj" in name or "k_proj" in name:
            # Gives scores of about 1.3. If they were much wider, one row would take all of the attention;
            # rounding would then decide which row it is, and float32 runs would differ by more than 1e-4.
            p.data = 1.13 / p.shape[1] ** 0.5 * torch.randn_like(p)
        else:
            p.data = 0.2 * torch.randn_like(p)


def make(name, out):
    cls, settings, save, edit = CASES[name]
    folder = out / name
    shutil.rmtree(folder, ignore_errors=True)
    torch.manual_seed(sum(map(ord, name)))
    config = cls(**{**COMMON, **settings})
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    with torch.no_grad():
        randomise(model)
    model.tie_weights()
    dtype = save.get("dtype", torch.float32)
    model.to(dtype).save_pretrained(folder, max_shard_size=save.get("max_shard_size", "10GB"))
    (folder / "generation_config.json").unlink(missing_ok=True)
    path = folder / "config.json"
    if edit:
        path.write_text(json.dumps(edit(json.loads(path.read_text())), indent=2) + "\n")

    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, attn_implementation="eager", dtype=torch.float32).eval()
    assert model.config._attn_implementation == "eager"
    tokens = torch.randint(0, config.vocab_size, (1, TOKENS))
    with torch.no_grad():
        logits = model(tokens).logits[0]
        wide = model.double()(tokens).logits[0]
    assert logits.dtype == torch.float32 and logits.isfinite().all()
    noise = (logits - wide).abs().max().item()  # the error of float32 in transformers itself
    save_file({"tokens": tokens[0], "logits": logits.contiguous()}, folder / "golden.safetensors")
    size = sum(f.stat().st_size for f in folder.iterdir())
    print(f"{name:28} {size / 1024:7.0f} KB   logits: std {logits.std():.2f}, "
          f"largest {logits.abs().max():.2f}; float32 against float64: {noise:.1e}")
    return {"architecture": model.config.architectures[0], "dtype": str(dtype), "bytes": size,
            "logits_std": round(logits.std().item(), 3), "float32_noise": float(f"{noise:.1e}")}


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent / "goldens")
    parser.add_argument("--only", choices=CASES)
    args = parser.parse_args()
    torch.set_num_threads(1)
    made = {name: make(name, args.out) for name in ([args.only] if args.only else CASES)}
    if not args.only:
        about = {"torch": torch.__version__, "transformers": transformers.__version__,
                 "attention": "eager", "computed_in": "float32", "tokens": TOKENS,
                 "checkpoints": made}
        (args.out / "about.json").write_text(json.dumps(about, indent=2) + "\n")


if __name__ == "__main__":
    main()
