#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests examples/adopters/llama2.c/convert.py on a tiny Llama that is written here: each tensor lies where the engine
reads it, rotated channels are interleaved, and what the engine cannot compute is refused."""
import json
import random
import struct
import subprocess
import sys
import tempfile
import unittest
from pathlib import Path

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "adopters" / "llama2.c" / "convert.py"
DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, WORDS, TOKENS, HEAD_DIM = 16, 24, 2, 2, 1, 7, 32, 8
CONFIG = {"model_type": "llama", "hidden_act": "silu", "hidden_size": DIM, "intermediate_size": HIDDEN,
          "num_hidden_layers": LAYERS, "num_attention_heads": HEADS, "num_key_value_heads": KV_HEADS,
          "vocab_size": WORDS, "max_position_embeddings": TOKENS, "rms_norm_eps": 1e-5, "rope_theta": 50000.0,
          "tie_word_embeddings": True, "rope_scaling": None}
# A space is the character Ġ; the last token is not part of the vocabulary of merges.
TOKENIZER = {"added_tokens": [{"id": 6, "content": "<end>"}],
             "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "Ġ": 2, "ab": 3, "Ġab": 4, "é": 5, "<end>": 6},
                       "merges": ["a b", ["Ġ", "ab"]]}}
BLOCK = {"input_layernorm": (DIM,), "self_attn.q_proj": (DIM, DIM), "self_attn.k_proj": (KV_HEADS * HEAD_DIM, DIM),
         "self_attn.v_proj": (KV_HEADS * HEAD_DIM, DIM), "self_attn.o_proj": (DIM, DIM),
         "post_attention_layernorm": (DIM,), "mlp.gate_proj": (HIDDEN, DIM), "mlp.down_proj": (DIM, HIDDEN),
         "mlp.up_proj": (HIDDEN, DIM)}


def number_of(shape):
    count = 1
    for size in shape:
        count *= size
    return count


class Convert(unittest.TestCase):
    def setUp(self):
        self.holder = tempfile.TemporaryDirectory()
        self.addCleanup(self.holder.cleanup)
        self.folder = Path(self.holder.name)
        draw = random.Random(5)
        self.tensors = {"model.embed_tokens.weight": (WORDS, DIM), "model.norm.weight": (DIM,),
                        "lm_head.weight": (WORDS, DIM)}
        for layer in range(LAYERS):
            self.tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in BLOCK.items()}
        # Halves of small numbers are exact in both formats.
        self.values = {name: [draw.randrange(-200, 200) / 2 for _ in range(number_of(shape))]
                       for name, shape in self.tensors.items()}

    def write(self, config=CONFIG, tokenizer=TOKENIZER, dtype="BF16", without=""):
        (self.folder / "config.json").write_text(json.dumps(config))
        (self.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        names = [name for name in self.tensors if name != without]
        for shard, own in enumerate((names[:5], names[5:])):
            header, data = {"__metadata__": {"format": "pt"}}, b""
            for name in own:
                packed = struct.pack(f"<{len(self.values[name])}f", *self.values[name])
                if dtype == "BF16":
                    packed = b"".join(packed[i + 2:i + 4] for i in range(0, len(packed), 4))
                header[name] = {"dtype": dtype, "shape": self.tensors[name],
                                "data_offsets": [len(data), len(data) + len(packed)]}
                data += packed
            text = json.dumps(header).encode()
            (self.folder / f"model-{shard}.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)

    def convert(self):
        return subprocess.run([sys.executable, SCRIPT, self.folder, self.folder / "model.bin", self.folder / "tok.bin"],
                              capture_output=True, text=True)

    def test_checkpoint(self):
        for dtype in ("BF16", "F32"):
            for shared in (True, False):
                self.write(CONFIG | {"tie_word_embeddings": shared}, dtype=dtype)
                done = self.convert()
                self.assertEqual(done.returncode, 0, done.stderr)
                self.assertIn("-r 50000", done.stdout)
                data = (self.folder / "model.bin").read_bytes()
                self.assertEqual(struct.unpack_from("<7i", data),
                                 (DIM, HIDDEN, LAYERS, HEADS, KV_HEADS, WORDS if shared else -WORDS, TOKENS))
                numbers = iter(struct.unpack(f"<{len(data) // 4 - 7}f", data[28:]))

                def take(name, shape=()):
                    return [next(numbers) for _ in range(number_of(self.tensors.get(name, shape)))]

                self.assertEqual(take("model.embed_tokens.weight"), self.values["model.embed_tokens.weight"])
                for name in BLOCK:
                    for layer in range(LAYERS):
                        full = f"model.layers.{layer}.{name}.weight"
                        read, own = take(full), self.values[full]
                        if name not in ("self_attn.q_proj", "self_attn.k_proj"):
                            self.assertEqual(read, own, full)
                            continue
                        for row in range(len(own) // DIM):
                            head, channel = divmod(row, HEAD_DIM)
                            # The engine rotates 2i with 2i + 1, the file's model i with i + head_dim / 2.
                            half, i = divmod(channel, HEAD_DIM // 2)
                            at = head * HEAD_DIM + 2 * i + half
                            self.assertEqual(read[at * DIM:(at + 1) * DIM], own[row * DIM:(row + 1) * DIM], full)
                self.assertEqual(take("model.norm.weight"), self.values["model.norm.weight"])
                take("RoPE", (TOKENS, HEAD_DIM))
                if not shared:
                    self.assertEqual(take("lm_head.weight"), self.values["lm_head.weight"])
                self.assertEqual(list(numbers), [])

    def test_tokenizer(self):
        self.write()
        self.assertEqual(self.convert().returncode, 0)
        data = (self.folder / "tok.bin").read_bytes()
        self.assertEqual(struct.unpack_from("<i", data), (5,))
        at, pieces, scores = 4, [], []
        while at < len(data):
            score, length = struct.unpack_from("<fi", data, at)
            pieces.append(data[at + 8:at + 8 + length])
            scores.append(score)
            at += 8 + length
        self.assertEqual(pieces, [b"a", b"b", b" ", b"ab", b" ab", b"\xe9", b"<end>"])
        self.assertGreater(scores[3], scores[4])  # merged first
        self.assertGreater(scores[4], -1e10)
        self.assertLess(scores[6], -1e10)  # never merged, says the engine's least score

    def test_refusals(self):
        for change, says in [({"rope_scaling": {"factor": 8}}, "rope_scaling"), ({"rms_norm_eps": 1e-6}, "rms_norm_eps"),
                             ({"model_type": "qwen2"}, "model_type is qwen2"), ({"head_dim": 4}, "head_dim is 4"),
                             ({"quantization_config": {}}, "quantization_config"), ({"hidden_act": "gelu"}, "hidden_act"),
                             ({"intermediate_size": 25}, "must have BF16 or F32 [25, 16]")]:
            self.write(CONFIG | change)
            done = self.convert()
            self.assertEqual(done.returncode, 1)
            self.assertIn(says, done.stderr)
            self.assertNotIn("Traceback", done.stderr)
        self.write(without="model.norm.weight")
        self.assertIn("no *.safetensors has the tensor model.norm.weight", self.convert().stderr)
        self.write(dtype="F16")
        self.assertIn("has F16", self.convert().stderr)
        self.write(tokenizer={"added_tokens": [], "model": {"type": "Unigram"}})
        self.assertIn("must be byte-level BPE", self.convert().stderr)
        for broken in ("{", '{"model": {"type": "BPE"}, "added_tokens": []}'):
            (self.folder / "tokenizer.json").write_text(broken)
            done = self.convert()
            self.assertEqual((done.returncode, "Traceback" in done.stderr), (1, False), done.stderr)
        self.write()
        (self.folder / "model-1.safetensors").write_bytes(b"\1\2")
        done = self.convert()
        self.assertEqual((done.returncode, "Traceback" in done.stderr), (1, False), done.stderr)


if __name__ == "__main__":
    unittest.main(verbosity=2)
