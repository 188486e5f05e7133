# SPDX-License-Identifier: Apache-2.0
"""Makes tests/gradient/goldens.json: gate gradients by PyTorch autograd, in float64, for tiny
checkpoints of tests/model/goldens, against which the C++ backward pass is tested.

    python -m venv venv && venv/bin/pip install torch safetensors
    venv/bin/python tests/gradient/make_goldens.py

The model is written out here once more, from the published formulas; that it is the same model is
checked by the logits which transformers gave for the checkpoint (golden.safetensors).
"""
import json
import pathlib

import torch
from safetensors.torch import load_file

HERE = pathlib.Path(__file__).parent
MODELS = HERE.parent / "model" / "goldens"
# name: (sinks, recent). Texts are 150 tokens long.
CASES = {"gqa2_d80": (3, 20), "all_biases": (0, 9), "qwen2_bias_gqa7": (16, 40), "mha_d64": (5, 0),
         "qwen3_norms": (2, 25)}


def load(name):
    folder = MODELS / name
    weights = {k: v.double() for f in sorted(folder.glob("model*.safetensors"))
               for k, v in load_file(f).items()}
    return json.loads((folder / "config.json").read_text()), weights


class Model:
    def __init__(self, name):
        self.c, self.w = load(name)
        c = self.c
        self.q_heads, self.kv_heads = c["num_attention_heads"], c["num_key_value_heads"]
        self.dim = c.get("head_dim") or c["hidden_size"] // self.q_heads
        rope = c.get("rope_parameters") or {}
        self.theta = rope.get("rope_theta", c.get("rope_theta"))

    def linear(self, x, name):
        return x @ self.w[name + ".weight"].T + self.w.get(name + ".bias", 0)

    def norm(self, x, name):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.c["rms_norm_eps"]) * self.w[name + ".weight"]

    def rotate(self, x):  # [tokens, heads, dim]
        half = self.dim // 2
        frequencies = self.theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angle = torch.arange(len(x), dtype=torch.float64)[:, None, None] * frequencies
        low, high = x[..., :half], x[..., half:]
        return torch.cat([low * angle.cos() - high * angle.sin(), high * angle.cos() + low * angle.sin()], -1)

    def qkv(self, x, at):
        n = len(x)
        q = self.linear(x, at + "q_proj").view(n, self.q_heads, self.dim)
        k = self.linear(x, at + "k_proj").view(n, self.kv_heads, self.dim)
        if at + "q_norm.weight" in self.w:
            q, k = self.norm(q, at + "q_norm"), self.norm(k, at + "k_norm")
        q, k = self.rotate(q), self.rotate(k)
        return q, k, self.linear(x, at + "v_proj").view(n, self.kv_heads, self.dim)

    def attend(self, q, k, v, mask):
        group = self.q_heads // self.kv_heads
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        scores = torch.einsum("qhd,khd->hqk", q, k) / self.dim ** 0.5
        return torch.einsum("hqk,khd->qhd", scores.masked_fill(~mask, -torch.inf).softmax(-1), v)

    def run(self, tokens, gates=None, sinks=0, recent=0, full=None):
        """Hidden rows after the norm, and each layer's attention. gates: mixed; full: each layer's
        attention of the unmodified run, None for the mixed run's own."""
        n = len(tokens)
        t, p = torch.arange(n)[:, None], torch.arange(n)[None]
        causal = p <= t
        streaming = causal & ((p < sinks) | (p > t - recent))
        x = self.w["model.embed_tokens.weight"][tokens]
        kept = []
        for i in range(self.c["num_hidden_layers"]):
            at = f"model.layers.{i}."
            q, k, v = self.qkv(self.norm(x, at + "input_layernorm"), at + "self_attn.")
            out = self.attend(q, k, v, causal) if full is None else full[i]
            if gates is not None:
                a = gates[i].repeat_interleave(self.q_heads // self.kv_heads)[None, :, None]
                out = a * out + (1 - a) * self.attend(q, k, v, streaming)
            kept.append(out.detach())
            x = x + self.linear(out.reshape(n, -1), at + "self_attn.o_proj")
            y = self.norm(x, at + "post_attention_layernorm")
            y = torch.nn.functional.silu(self.linear(y, at + "mlp.gate_proj")) * self.linear(y, at + "mlp.up_proj")
            x = x + self.linear(y, at + "mlp.down_proj")
        return self.norm(x, "model.norm"), kept

    def logits(self, hidden):
        head = self.w.get("lm_head.weight", self.w["model.embed_tokens.weight"])
        return hidden @ head.T


def main():
    torch.manual_seed(5)
    torch.set_num_threads(1)
    result = {}
    for name, (sinks, recent) in CASES.items():
        model = Model(name)
        golden = load_file(MODELS / name / "golden.safetensors")
        tokens = golden["tokens"]
        with torch.no_grad():
            hidden, full = model.run(tokens)
        error = (model.logits(hidden) - golden["logits"]).abs().max().item()
        assert error < 1e-4, error  # checks that this is the same model
        labels = torch.randperm(len(tokens) - 1)[:37].sort().values + 1
        gates = torch.rand(model.c["num_hidden_layers"], model.kv_heads, dtype=torch.float64)
        if model.kv_heads > 1:  # also test closed and open gates
            gates[0, 0], gates[1, -1] = 1.0, 0.0
        case = {"sinks": sinks, "recent": recent, "labels": labels.tolist(), "gates": gates.tolist(), "runs": []}
        for mixing in ("full_of_unmodified", "full_of_mixed"):
            for kind in ("distillation", "language"):
                a = gates.clone().requires_grad_()
                mixed, _ = model.run(tokens, a, sinks, recent, full if mixing == "full_of_unmodified" else None)
                if kind == "distillation":
                    loss = (mixed - hidden)[labels].pow(2).mean()
                else:
                    loss = torch.nn.functional.cross_entropy(model.logits(mixed)[labels - 1], tokens[labels])
                loss.backward()
                case["runs"].append({"mixing": mixing, "loss": kind, "value": loss.item(),
                                     "gradient": a.grad.tolist()})
                print(name, mixing, kind, loss.item(), a.grad.abs().max().item())
        result[name] = case
    (HERE / "goldens.json").write_text(json.dumps(result, indent=1) + "\n")


if __name__ == "__main__":
    main()
