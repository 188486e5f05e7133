# SPDX-License-Identifier: Apache-2.0
"""Reads a model from a training checkpoint or a saved folder; writes the folder.

    python checkpoint.py runs/keyfinder/checkpoint.pt ../weights/keyfinder

The folder is a Hugging Face one: config.json and model.safetensors, bfloat16.
"""
import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from model import Llama, Shape


def config(shape):
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": None,
        "eos_token_id": None,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "hidden_size": shape.width,
        "initializer_range": 0.02,
        "intermediate_size": shape.mlp,
        "max_position_embeddings": shape.max_positions,
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": shape.query_heads,
        "num_hidden_layers": shape.layers,
        "num_key_value_heads": shape.kv_heads,
        "pretraining_tp": 1,
        "rms_norm_eps": shape.norm_eps,
        "rope_scaling": None,
        "rope_theta": shape.rope_theta,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": shape.vocabulary,
    }


def load(path):
    """A model with float32 weights, ready for evaluation."""
    path = Path(path)
    if path.is_dir():
        c = json.loads((path / "config.json").read_text())
        shape = Shape(c["num_hidden_layers"], c["hidden_size"], c["num_attention_heads"], c["num_key_value_heads"],
                      c["head_dim"], c["intermediate_size"], c["vocab_size"], c["rope_theta"],
                      c["max_position_embeddings"], c["rms_norm_eps"])
        state = load_file(path / "model.safetensors")
    else:
        saved = torch.load(path, map_location="cpu", weights_only=False)
        shape, state = Shape(**saved["shape"]), saved["model"]
    model = Llama(shape)
    model.load_state_dict({name: tensor.float() for name, tensor in state.items()})
    return model.eval()


def save(model, folder):
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config(model.shape), indent=2) + "\n")
    state = {name: tensor.detach().to(torch.bfloat16).contiguous() for name, tensor in model.state_dict().items()}
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)    # save_file makes it private
    return (folder / "model.safetensors").stat().st_size


if __name__ == "__main__":
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("checkpoint")
    p.add_argument("folder")
    a = p.parse_args()
    print(f"{save(load(a.checkpoint), a.folder) / 1e6:.2f} MB")
