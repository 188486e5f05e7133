# SPDX-License-Identifier: Apache-2.0
"""A small Llama in plain PyTorch: RMSNorm, rotary positions, grouped-query attention, SwiGLU.

Parameter names and shapes are those of Hugging Face's LlamaForCausalLM, so that a saved
state dict is a checkpoint which that class loads. Vocabulary: the 256 byte values.
"""
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn


@dataclass(frozen=True)
class Shape:
    layers: int = 4
    width: int = 192
    query_heads: int = 8
    kv_heads: int = 4
    head_dim: int = 64
    mlp: int = 512
    vocabulary: int = 256
    rope_theta: float = 1e7
    max_positions: int = 10240
    norm_eps: float = 1e-5


def rotation(positions, shape):
    """cos and sin, [batch, 1, tokens, head_dim / 2], for the half-split layout of Llama checkpoints."""
    half = torch.arange(0, shape.head_dim, 2, device=positions.device, dtype=torch.float32)
    frequency = shape.rope_theta ** (-half / shape.head_dim)
    angle = positions[:, None, :, None].float() * frequency
    return angle.cos(), angle.sin()


def rotate(x, cos, sin):
    first, second = x.chunk(2, -1)
    cos, sin = cos.to(x.dtype), sin.to(x.dtype)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


class Attention(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.s = s
        self.q_proj = nn.Linear(s.width, s.query_heads * s.head_dim, bias=False)
        self.k_proj = nn.Linear(s.width, s.kv_heads * s.head_dim, bias=False)
        self.v_proj = nn.Linear(s.width, s.kv_heads * s.head_dim, bias=False)
        self.o_proj = nn.Linear(s.query_heads * s.head_dim, s.width, bias=False)

    def forward(self, x, cos, sin, attend):
        s = self.s
        b, t, _ = x.shape
        # One product for all three, and one rotation for q and k: on a CPU a small model spends
        # half its time between the matrix products.
        weights = torch.cat([self.q_proj.weight, self.k_proj.weight, self.v_proj.weight])
        qkv = F.linear(x, weights).view(b, t, -1, s.head_dim).transpose(1, 2)
        qk, v = qkv.split([s.query_heads + s.kv_heads, s.kv_heads], 1)
        q, k = rotate(qk, cos, sin).split([s.query_heads, s.kv_heads], 1)
        out = attend(q, k, v)
        return self.o_proj(out.transpose(1, 2).reshape(b, t, -1))


class Mlp(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.gate_proj = nn.Linear(s.width, s.mlp, bias=False)
        self.up_proj = nn.Linear(s.width, s.mlp, bias=False)
        self.down_proj = nn.Linear(s.mlp, s.width, bias=False)

    def forward(self, x):
        gate, up = F.linear(x, torch.cat([self.gate_proj.weight, self.up_proj.weight])).chunk(2, -1)
        return self.down_proj(F.silu(gate) * up)


class Layer(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.input_layernorm = nn.RMSNorm(s.width, eps=s.norm_eps)
        self.self_attn = Attention(s)
        self.post_attention_layernorm = nn.RMSNorm(s.width, eps=s.norm_eps)
        self.mlp = Mlp(s)

    def forward(self, x, cos, sin, attend):
        x = x + self.self_attn(self.input_layernorm(x), cos, sin, attend)
        return x + self.mlp(self.post_attention_layernorm(x))


def causal_attention(q, k, v):
    group = q.shape[1] // k.shape[1]
    k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Body(nn.Module):
    def __init__(self, s):
        super().__init__()
        self.embed_tokens = nn.Embedding(s.vocabulary, s.width)
        self.layers = nn.ModuleList(Layer(s) for _ in range(s.layers))
        self.norm = nn.RMSNorm(s.width, eps=s.norm_eps)


class Llama(nn.Module):
    """logits = model(tokens, positions). `attends`: one attention function per layer, for tests
    that change what a head may see; each maps q [batch, query heads, tokens, head_dim] and k, v
    [batch, KV heads, tokens, head_dim], rotated, to q's shape."""

    def __init__(self, shape):
        super().__init__()
        self.shape = shape
        self.model = Body(shape)
        self.lm_head = nn.Linear(shape.width, shape.vocabulary, bias=False)
        for name, p in self.named_parameters():
            if p.ndim == 2:
                std = 0.02 if "embed" in name else p.shape[1] ** -0.5
                if name.endswith(("o_proj.weight", "down_proj.weight")):
                    std /= (2 * shape.layers) ** 0.5
                nn.init.normal_(p, std=std)

    def hidden(self, tokens, positions=None, attends=None):
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device).expand(tokens.shape)
        cos, sin = rotation(positions, self.shape)
        x = self.model.embed_tokens(tokens)
        for i, layer in enumerate(self.model.layers):
            x = layer(x, cos, sin, attends[i] if attends else causal_attention)
        return self.model.norm(x)

    def forward(self, tokens, positions=None, attends=None):
        return self.lm_head(self.hidden(tokens, positions, attends))

    def parameter_count(self):
        return sum(p.numel() for p in self.parameters())
