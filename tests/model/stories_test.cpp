// SPDX-License-Identifier: Apache-2.0
//
// stories260K, a real model whose heads have 8 channels, tells the story that llama2.c tells. Its checkpoint
// and tokenizer are in real_model/stories260K, beside the folder of published data (io/shared_data.hpp).
// Without them the test prints a message and passes.
#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>
#include <reference_model/run.hpp>

#include "io/shared_data.hpp"
#include "model/dense_attention.hpp"

namespace kvpolicy::reference::stories_test {
namespace {

const std::string folder = (testing::shared_data() / ".." / "real_model" / "stories260K" / "").string();

bool is_there() {
  const bool there = std::filesystem::exists(folder + "checkpoint_legacy.bin");
  if (!there) MESSAGE("skipped: there is no ", folder, "checkpoint_legacy.bin");
  return there;
}

std::string bytes_of(const std::string& path) {
  std::ifstream file{path, std::ios::binary};
  return {std::istreambuf_iterator<char>{file}, {}};
}

// Reads numbers one after another.
class Reader {
 public:
  explicit Reader(std::string bytes) : bytes_{std::move(bytes)} {}
  template <class T>
  T next() {
    T value;
    std::memcpy(&value, bytes_.data() + at_, sizeof value);
    at_ += sizeof value;
    return value;
  }
  std::vector<float> floats(std::size_t count) {
    std::vector<float> values(count);
    std::memcpy(values.data(), bytes_.data() + at_, count * sizeof(float));
    at_ += count * sizeof(float);
    return values;
  }
  std::string text(std::size_t count) { return bytes_.substr(std::exchange(at_, at_ + count), count); }
  [[nodiscard]] std::size_t left() const { return bytes_.size() - at_; }

 private:
  std::string bytes_;
  std::size_t at_ = 0;
};

// The checkpoint pairs neighbouring channels in rotations, this model channels that are half a head apart: in
// each head the even rows come first, then the odd ones.
std::vector<float> halves_apart(const std::vector<float>& rows, std::size_t head_dim, std::size_t inputs) {
  std::vector<float> moved(rows.size());
  for (std::size_t row = 0; row < rows.size() / inputs; ++row) {
    const std::size_t channel = row % head_dim;
    const std::size_t from =
        row - channel + (channel < head_dim / 2 ? 2 * channel : 2 * channel - head_dim + 1);
    std::copy_n(rows.begin() + static_cast<std::ptrdiff_t>(from * inputs), inputs,
                moved.begin() + static_cast<std::ptrdiff_t>(row * inputs));
  }
  return moved;
}

Llama load_stories() {
  Reader file{bytes_of(folder + "checkpoint_legacy.bin")};
  const auto size = [&] { return static_cast<std::size_t>(file.next<std::int32_t>()); };
  LlamaConfig c;
  c.hidden = size();
  c.intermediate = size();
  c.layers = size();
  c.q_heads = size();
  c.kv_heads = size();
  c.vocabulary = size();
  c.max_positions = size();
  c.head_dim = c.hidden / c.q_heads;
  c.norm_eps = 1e-5F;
  c.tied_embeddings = true;
  c.windows.assign(c.layers, 0);
  const std::size_t kv_width = c.kv_heads * c.head_dim;

  LlamaWeights w;
  w.embedding = {c.hidden, c.vocabulary, file.floats(c.vocabulary * c.hidden), {}};
  w.layers.resize(c.layers);
  // The file has each kind of weight for all layers before the next kind.
  const auto norms = [&](std::vector<float> LlamaLayer::*norm) {
    for (LlamaLayer& layer : w.layers) layer.*norm = file.floats(c.hidden);
  };
  const auto linears = [&](Linear LlamaLayer::*linear, std::size_t inputs, std::size_t outputs,
                           bool rotated) {
    for (LlamaLayer& layer : w.layers) {
      std::vector<float> weight = file.floats(inputs * outputs);
      if (rotated) weight = halves_apart(weight, c.head_dim, inputs);
      layer.*linear = {inputs, outputs, std::move(weight), {}};
    }
  };
  norms(&LlamaLayer::attention_norm);
  linears(&LlamaLayer::q, c.hidden, c.hidden, true);
  linears(&LlamaLayer::k, c.hidden, kv_width, true);
  linears(&LlamaLayer::v, c.hidden, kv_width, false);
  linears(&LlamaLayer::o, c.hidden, c.hidden, false);
  norms(&LlamaLayer::mlp_norm);
  linears(&LlamaLayer::gate, c.hidden, c.intermediate, false);
  linears(&LlamaLayer::down, c.intermediate, c.hidden, false);
  linears(&LlamaLayer::up, c.hidden, c.intermediate, false);
  w.norm = file.floats(c.hidden);
  REQUIRE(file.left() == c.max_positions * c.head_dim * sizeof(float));  // tables of sines and cosines
  return Llama{std::move(c), std::move(w)};
}

// The text of each token. A space at the beginning of a text is dropped.
std::vector<std::string> load_words(std::size_t count) {
  Reader file{bytes_of(folder + "tokenizer.bin")};
  file.next<std::int32_t>();  // length of the longest token
  std::vector<std::string> words;
  for (std::size_t i = 0; i < count; ++i) {
    file.next<float>();  // a score
    std::string word = file.text(static_cast<std::size_t>(file.next<std::int32_t>()));
    words.push_back(word == "<0x0A>" ? "\n" : std::move(word));
  }
  return words;
}

// The texts of the likeliest tokens, `count` of them, starting from an empty text.
template <class Cache>
std::string tell(const Llama& model, Cache& cache, std::size_t tokens) {
  const std::vector<std::string> words = load_words(model.config().vocabulary);
  std::string story;
  int token = 1;  // the token for the beginning of a text
  for (std::size_t i = 0; i < tokens; ++i) {
    const std::vector<float> logits = step(model, cache, std::array{token});
    token = static_cast<int>(std::ranges::max_element(logits) - logits.begin());
    story += words[static_cast<std::size_t>(token)];
  }
  return story.substr(story.starts_with(' ') ? 1 : 0);
}

// The output of llama2.c for `run stories260K.bin -t 0.0 -n 200`.
constexpr const char* story =
    "Once upon a time, there was a little girl named Lily. She loved to play outside in the park. "
    "One day, she saw "
    "a big, red ball. She wanted to play with it, but it was too high.\nLily's mom said, \"Lily, "
    "let's go to the "
    "park.\" Lily was sad and didn't know what to do. She said, \"I want to play with your ball, "
    "but I can't find "
    "it.\"\nLily was sad and didn't know what to do. She said, \"I'm sorry, Lily. I didn't know "
    "what to do.\"\nLily "
    "didn't want to help her mom, so she";

TEST_CASE("a model with heads of 8 channels tells its story") {
  if (!is_there()) return;
  const Llama model = load_stories();
  REQUIRE(model.config().shape() == ModelShape{.layers = 5, .q_heads = 8, .kv_heads = 4, .head_dim = 8});
  KvCache cache{HeadPlan<float>{model.config().shape()}};
  const std::string told = tell(model, cache, 200);
  CHECK(told.starts_with(story));
}

TEST_CASE("its logits equal those of dense attention, and are close to them with 8 bits") {
  if (!is_there()) return;
  const Llama model = load_stories();
  std::vector<int> tokens{1};
  for (int i = 0; i < 120; ++i) tokens.push_back(3 + (i * 37) % 500);
  DenseCache dense{model.config()};
  const std::vector<float> expected = model.forward(tokens, 0, dense.attend(), LogitsOf::all);
  const auto largest = [&](const HeadSettings<float>& settings) {
    KvCache cache{HeadPlan<float>{model.config().shape(), settings}};
    float most = 0;
    for (std::size_t first = 0; first < tokens.size(); first += 11) {
      const std::vector<float> logits =
          step(model, cache, std::span{tokens}.subspan(first, 11), LogitsOf::all);
      const float* wanted = expected.data() + first * model.config().vocabulary;
      for (std::size_t i = 0; i < logits.size(); ++i) most = std::max(most, std::abs(logits[i] - wanted[i]));
    }
    MESSAGE("largest difference ", most);
    return most;
  };
  CHECK(largest(FullCache<DenseStorage<float>>::Config{}) <= 1e-4F);
  CHECK(largest(QuantizedResidualCache<float>::Config{.storage = {.bits = 8, .residual = 4}}) <= 0.5F);
}

}  // namespace
}  // namespace kvpolicy::reference::stories_test
