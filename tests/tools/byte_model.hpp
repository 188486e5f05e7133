// SPDX-License-Identifier: Apache-2.0
//
// Models with random weights, for tests of code that uses a model: one that reads bytes, one that
// reads the words of a small tokenizer.
#pragma once

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <random>
#include <string>
#include <string_view>
#include <vector>

#include <common/text_model.hpp>
#include <reference_model/llama.hpp>

#include "support/source_dir.hpp"

namespace kvpolicy::tools {

// Two layers of a byte model with random weights: its answers are nonsense, but always the same.
inline reference::Llama random_byte_model(std::size_t vocabulary = 256) {
  reference::LlamaConfig config;
  config.vocabulary = vocabulary;
  config.hidden = 32;
  config.intermediate = 48;
  config.layers = 2;
  config.q_heads = 4;
  config.kv_heads = 2;
  config.head_dim = 64;
  config.max_positions = 4096;
  config.rotary.theta = 1e4F;
  config.windows = {0, 0};
  std::mt19937 bits{7};
  const auto numbers = [&](std::size_t count) {
    std::vector<float> drawn(count);
    for (float& x : drawn) x = static_cast<float>(bits() % 2001) / 1000.0F - 1.0F;
    return drawn;
  };
  const auto linear = [&](std::size_t inputs, std::size_t outputs) {
    return reference::Linear{inputs, outputs, numbers(inputs * outputs), {}};
  };
  reference::LlamaWeights weights;
  weights.embedding = linear(32, vocabulary);
  for (std::size_t layer = 0; layer < 2; ++layer) {
    weights.layers.push_back({.attention_norm = std::vector<float>(32, 1.0F),
                              .q = linear(32, 256),
                              .k = linear(32, 128),
                              .v = linear(32, 128),
                              .o = linear(256, 32),
                              .q_norm = {},
                              .k_norm = {},
                              .mlp_norm = std::vector<float>(32, 1.0F),
                              .gate = linear(32, 48),
                              .up = linear(32, 48),
                              .down = linear(48, 32)});
  }
  weights.norm.assign(32, 1.0F);
  weights.head = linear(32, vocabulary);
  return {config, weights};
}

inline TextModel random_text_model() { return {random_byte_model(), reference::Tokenizer::bytes()}; }

// Byte-level byte-pair encoding with single digits, 700 tokens.
inline TextModel random_word_model() {
  return {random_byte_model(700),
          reference::Tokenizer::load(testing::source_dir() + "/tests/tokenizer/goldens/smollm")};
}

// The same with a chat template, ChatML.
inline TextModel chatting_model() {
  namespace fs = std::filesystem;
  constexpr const char* chatml =
      "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content'] + "
      "'<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}"
      "{% endif %}";
  const fs::path folder = fs::temp_directory_path() / "kvpolicy_chatting_model";
  fs::create_directories(folder);
  fs::copy_file(fs::path{testing::source_dir()} / "tests/tokenizer/goldens/smollm/tokenizer.json",
                folder / "tokenizer.json", fs::copy_options::overwrite_existing);
  std::ofstream{folder / "chat_template.jinja"} << chatml;
  auto tokenizer = reference::Tokenizer::load(folder);
  fs::remove_all(folder);
  return {random_byte_model(700), tokenizer};
}

// The bytes of a text as tokens.
inline std::vector<int> bytes_of(std::string_view text) {
  std::vector<int> tokens;
  for (const char byte : text) tokens.push_back(static_cast<unsigned char>(byte));
  return tokens;
}

}  // namespace kvpolicy::tools
