# SPDX-License-Identifier: Apache-2.0
"""The methods of other libraries, by name: presses of kvpress, and the caches of transformers. Settings are those of the
library unless a line here says otherwise."""
import contextlib
import dataclasses
import json
from pathlib import Path

import numpy
import torch
import transformers

# name: the press; each drops rows once, when a forward pass that began with an empty cache ends. KVzip's reads the text a
# second time then.
PRESSES = {
    "snapkv": "SnapKVPress",
    "streaming_llm": "StreamingLLMPress",
    "tova": "TOVAPress",
    "pyramid": "PyramidKVPress",
    "adakv": "AdaKVPress",  # over SnapKVPress
    "expected_attention": "ExpectedAttentionPress",
    "keynorm": "KnormPress",
    "keydiff": "KeyDiffPress",
    "kvzip": "KVzipPress",
    "duo": "DuoAttentionPress",
}
BACKENDS = ("quanto", "hqq")
NAMES = ["full", *PRESSES, *(f"{backend}{bits}" for backend in BACKENDS for bits in (2, 4))]


def has_ratio(name):
    """Whether the method takes a ratio; the others keep what they keep."""
    return name in PRESSES


class Full:
    """Every row, as the model wrote it: the control."""

    copies = True  # a cache can be copied for each question
    row_step = 1  # a prompt is read in one call up to a multiple of this, and its other tokens after it

    def settings(self):
        return {}

    def new_cache(self, model):  # pylint: disable=unused-argument
        return transformers.DynamicCache()

    def reading(self, model, tokens):  # pylint: disable=unused-argument
        return contextlib.nullcontext()


class Quantized(Full):
    """transformers' QuantizedCache in groups of 64. Unlike KIVI's it quantises all of the prompt, its latest rows too; rows
    that come later are exact until there are 128 of them."""

    def __init__(self, backend, bits):
        self.backend = backend
        # HQQ's documentation asks for axis 1, quanto's knows 0 and -1.
        axis = 1 if backend == "hqq" else 0
        self.given = {"nbits": bits, "axis_key": axis, "axis_value": axis, "q_group_size": 64, "residual_length": 128}
        # Both pack 8 / bits groups into a byte: HQQ fails on another number of groups, which a model with an odd number of
        # KV heads has after an odd number of rows.
        self.row_step = 8 // bits

    copies = False  # quanto's tensors refuse to be copied

    def settings(self):
        return {"backend": self.backend, **self.given}

    def new_cache(self, model):
        return transformers.QuantizedCache(self.backend, model.config, **self.given)


class Press(Full):
    """`ratio` 4 keeps a quarter of the rows."""

    def __init__(self, name, ratio, duo_pattern):
        import kvpress  # it patches transformers' attention, so the other methods do without it

        self.ratio = ratio
        dropped = 1 - 1 / ratio
        if name == "adakv":
            self.press = kvpress.AdaKVPress(kvpress.SnapKVPress(compression_ratio=dropped))
        elif name == "duo":
            self.press = duo_press(kvpress.DuoAttentionPress, duo_pattern)
        else:
            self.press = getattr(kvpress, PRESSES[name])(compression_ratio=dropped)

    def settings(self):
        found = dataclasses.asdict(self.press)
        if hasattr(self.press, "from_pattern"):
            found = {"head_compression_ratio": found["head_compression_ratio"], **self.press.from_pattern}
        return {"press": type(self.press).__name__, **found}

    def reading(self, model, tokens):
        if hasattr(self.press, "from_pattern"):
            self.press.head_compression_ratio = streaming_share(self.ratio, tokens, **self.press.from_pattern)
        return without_prefix(self.press, model) if hasattr(self.press, "prefix_length") else self.press(model)


@contextlib.contextmanager
def without_prefix(press, model):
    """KVzipPress takes the first tokens for the start of a chat, scores them 0 and drops them; these texts have none."""
    with press(model):
        press.prefix_length = 0
        yield


def streaming_share(ratio, tokens, sink_size, recent_size):
    """The share of streaming heads with which one part in `ratio` of the rows is kept. @raises ValueError if that takes
    more than all heads"""
    streaming_rows = min(sink_size + recent_size, tokens)
    share = (1 - 1 / ratio) / (1 - streaming_rows / tokens) if streaming_rows < tokens else 2
    if share > 1:
        raise ValueError(f"{streaming_rows} of {tokens} rows are more than 1/{ratio} with all heads streaming")
    return share


def duo_press(base, folder):
    """kvpress fetches its patterns over the network, for six models by name; this one reads a folder of the same form."""
    if folder is None:
        raise ValueError("duo needs --duo-pattern FOLDER, with config.json and full_attention_heads.tsv")
    with open(Path(folder) / "config.json", encoding="utf-8") as file:
        config = json.load(file)
    scores = numpy.loadtxt(Path(folder) / "full_attention_heads.tsv", delimiter="\t", ndmin=2)

    class FromFolder(base):
        from_pattern = {"sink_size": config["sink_size"], "recent_size": config["recent_size"]}

        @staticmethod
        def load_attention_pattern(model):  # pylint: disable=unused-argument
            return config["sink_size"], config["recent_size"], numpy.clip(scores, 0, 1)

    return FromFolder()


def make_method(name, ratio=1, duo_pattern=None):
    """@raises ValueError for a name that there is not"""
    if name not in NAMES:
        raise ValueError(f"--method {name}: the methods are {', '.join(NAMES)}")
    if name == "full":
        return Full()
    if has_ratio(name):
        return Press(name, ratio, duo_pattern)
    return Quantized(name[:-1], int(name[-1]))


def is_even(cache):
    """Whether all layers hold equally many rows."""
    return len({cache.get_seq_length(layer) for layer in range(len(cache.layers))}) <= 1


def masks_of(model):
    """What the presses that drop nothing keep on the attention modules: the indices of rows that are not to be seen."""
    return [getattr(module, "masked_key_indices", None) for module in model.modules()
            if getattr(module, "masked_key_indices", None) is not None]


def row_bytes(model, cache, held):
    """The bytes of the rows that attention sees, where the cache's tensors are rows; otherwise what is held."""
    if isinstance(cache, transformers.QuantizedCache):
        return held
    layers = cache.layers
    total = sum(layer.keys.nbytes + layer.values.nbytes for layer in layers)
    one_row = (layers[0].keys.nbytes + layers[0].values.nbytes) // layers[0].keys[..., 0].numel()
    return total - one_row * sum(mask[0].numel() for mask in masks_of(model))


def load_model(folder, dtype):
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=getattr(torch, dtype), attn_implementation="sdpa", local_files_only=True).eval()
