# SPDX-License-Identifier: Apache-2.0
"""Writes a tiny model that chats, with random weights: its answers are nonsense, but always the same."""
import array
import json
import os
import random
import shutil
import struct

GOLDENS = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..", "tokenizer", "goldens", "smollm")
VOCABULARY = 700  # of that tokenizer: byte-level byte-pair encoding
HIDDEN, INTERMEDIATE, LAYERS, Q_HEADS, KV_HEADS, HEAD_DIM = 32, 48, 2, 4, 2, 64
# As some published templates do, it refuses to answer an answer.
CHATML = ("{% if add_generation_prompt and messages[-1].role == 'assistant' %}{{ raise_exception('nobody asks') }}{% endif %}"
          "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
          "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}")


# What the published ones do that are told of tools: calls are JSON, results have a role, and only the last answer says how it was
# thought out.
WITH_TOOLS = ("{% if tools %}<|im_start|>tools\n{% for tool in tools %}{{ tool | tojson }}\n{% endfor %}<|im_end|>\n{% endif %}"
              "{% for message in messages %}{% if message.role in ['system', 'user', 'tool', 'assistant'] %}"
              "{{ '<|im_start|>' + message.role + '\n' }}"
              "{% if message.reasoning_content and loop.last %}<think>{{ message.reasoning_content }}</think>{% endif %}"
              "{{ message.content or '' }}"
              "{% for call in message.tool_calls or [] %}[{{ call.function.name }} {{ call.function.arguments | tojson }}]{% endfor %}"
              "{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
              "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% if enable_thinking is defined and not enable_thinking %}"
              "<think></think>{% endif %}{% endif %}")


def tensors(rows):
    """The shape of each; `rows` of the embedding."""
    yield "model.embed_tokens.weight", [rows, HIDDEN]
    yield "model.norm.weight", [HIDDEN]
    yield "lm_head.weight", [rows, HIDDEN]
    for layer in range(LAYERS):
        of_layer = f"model.layers.{layer}."
        yield of_layer + "input_layernorm.weight", [HIDDEN]
        yield of_layer + "post_attention_layernorm.weight", [HIDDEN]
        yield of_layer + "self_attn.q_proj.weight", [Q_HEADS * HEAD_DIM, HIDDEN]
        yield of_layer + "self_attn.k_proj.weight", [KV_HEADS * HEAD_DIM, HIDDEN]
        yield of_layer + "self_attn.v_proj.weight", [KV_HEADS * HEAD_DIM, HIDDEN]
        yield of_layer + "self_attn.o_proj.weight", [HIDDEN, Q_HEADS * HEAD_DIM]
        yield of_layer + "mlp.gate_proj.weight", [INTERMEDIATE, HIDDEN]
        yield of_layer + "mlp.up_proj.weight", [INTERMEDIATE, HIDDEN]
        yield of_layer + "mlp.down_proj.weight", [HIDDEN, INTERMEDIATE]


def write(folder, template=CHATML, padding=0):
    """A Hugging Face folder with config, weights, tokenizer and chat template; `padding` rows of the embedding have no token."""
    os.makedirs(folder)
    drawn = random.Random(7)
    header, data = {}, b""
    for name, shape in tensors(VOCABULARY + padding):
        count = shape[0] * (shape[1] if len(shape) > 1 else 1)
        numbers = [1.0] * count if name.endswith("norm.weight") else [drawn.uniform(-1, 1) for _ in range(count)]
        begin = len(data)
        data += array.array("f", numbers).tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [begin, len(data)]}
    text = json.dumps(header).encode()
    with open(os.path.join(folder, "model.safetensors"), "wb") as file:
        file.write(struct.pack("<Q", len(text)) + text + data)
    with open(os.path.join(folder, "config.json"), "w") as file:
        json.dump({"architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu", "vocab_size": VOCABULARY + padding,
                   "hidden_size": HIDDEN, "intermediate_size": INTERMEDIATE, "num_hidden_layers": LAYERS,
                   "num_attention_heads": Q_HEADS, "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM,
                   "max_position_embeddings": 2048, "rms_norm_eps": 1e-5, "rope_theta": 1e4, "rope_scaling": None,
                   "tie_word_embeddings": False, "attention_bias": False, "mlp_bias": False, "bos_token_id": 0, "eos_token_id": 2,
                   "torch_dtype": "float32"}, file)
    with open(os.path.join(folder, "chat_template.jinja"), "w") as file:
        file.write(template)
    shutil.copy(os.path.join(GOLDENS, "tokenizer.json"), folder)
