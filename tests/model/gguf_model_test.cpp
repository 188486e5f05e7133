// SPDX-License-Identifier: Apache-2.0
//
// Models out of GGUF files: the same weights and settings as those of the folder that a file was
// made of, the logits of an independent forward pass for quantised matrices, and what is refused.
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>
#include <reference_model/gguf_model.hpp>
#include <reference_model/llama.hpp>

#include "io/says.hpp"
#include "model/dense_attention.hpp"
#include "model/gguf_bytes.hpp"
#include "model/golden.hpp"
#include "support/source_dir.hpp"
#include "support/temporary_folder.hpp"

namespace kvpolicy::reference::gguf_model_test {
namespace {

std::string gguf_path(const std::string& name) {
  return testing::source_dir() + "/tests/model/goldens_gguf/" + name + ".gguf";
}

TEST_CASE("a file has the weights and settings of the folder that it was made of") {
  for (const std::string name :
       {"all_biases", "qwen2_bias_gqa7", "tied_d64", "f16_d128", "llama3_scaling", "qwen3_norms"}) {
    CAPTURE(name);
    const Llama file = Llama::load(gguf_path(name));
    const Llama folder = Llama::load(golden_folder(name));
    const LlamaConfig& a = file.config();
    const LlamaConfig& b = folder.config();
    CHECK(a.shape() == b.shape());
    CHECK(a.vocabulary == b.vocabulary);
    CHECK(a.max_positions == b.max_positions);
    CHECK(a.norm_eps == b.norm_eps);
    CHECK(a.rotary == b.rotary);
    CHECK(a.tied_embeddings == b.tied_embeddings);
    CHECK(a.windows == b.windows);
    CHECK(a.eos_tokens == b.eos_tokens);
    CHECK(a.qk_norm == b.qk_norm);
    CHECK(load_llama_config(gguf_path(name)).hidden == b.hidden);
    CHECK(file.parameters() == folder.parameters());

    CHECK(file.weight_bytes() == folder.weight_bytes());  // each matrix in its stored format
    for (std::size_t i = 0; i < a.layers; ++i) {
      CHECK(file.weights().layers[i].q.weight == folder.weights().layers[i].q.weight);
      CHECK(file.weights().layers[i].down.weight == folder.weights().layers[i].down.weight);
    }

    const LoadOptions as_floats{.weights = WeightFormat::float32};
    const Llama float_file = Llama::load(gguf_path(name), as_floats);
    const Llama float_folder = Llama::load(golden_folder(name), as_floats);
    const Golden golden = load_golden(name);
    DenseCache one{a};
    DenseCache two{b};
    const std::vector<float> logits = all_logits(float_file, golden.tokens, 0, one.attend());
    CHECK(logits == all_logits(float_folder, golden.tokens, 0, two.attend()));
    CHECK(largest_error(logits, golden.logits) <= logit_tolerance);
  }
}

TEST_CASE("quantised matrices give the logits of an independent forward pass") {
  const Llama model = Llama::load(gguf_path("quantised"), {.weights = WeightFormat::float32});
  SafetensorsFile golden(gguf_path("quantised").replace(gguf_path("quantised").size() - 4, 4, "safetensors"));
  const std::vector<std::byte> bytes = golden.read_bytes("tokens");
  std::vector<std::int64_t> tokens(bytes.size() / sizeof(std::int64_t));
  std::memcpy(tokens.data(), bytes.data(), bytes.size());
  const std::vector<int> text(tokens.begin(), tokens.end());
  REQUIRE(text.size() == 40);
  DenseCache cache{model.config()};
  CHECK(largest_error(all_logits(model, text, 0, cache.attend()), golden.read_floats("logits")) <= 2e-4F);

  // Without a format the blocks become bfloat16, and the matrices stored as 16-bit floats stay.
  const Llama smaller = Llama::load(gguf_path("quantised"));
  const LlamaLayer& layer = smaller.weights().layers[0];
  CHECK(layer.q.weight == model.weights().layers[0].q.weight.as(WeightFormat::bfloat16));
  CHECK(layer.q.weight.format() == WeightFormat::bfloat16);
  CHECK(layer.up.weight.format() == WeightFormat::float16);
  CHECK(layer.down.weight.format() == WeightFormat::bfloat16);
  CHECK(layer.down.weight == model.weights().layers[0].down.weight);
}

TEST_CASE("what a file says of its tokenizer") {
  const GgufTokenizer tokenizer = gguf_tokenizer(GgufFile{gguf_path("quantised")});
  CHECK(tokenizer.model == "gpt2");
  CHECK(tokenizer.pre == "smollm");
  REQUIRE(tokenizer.tokens.size() == 64);
  CHECK(tokenizer.tokens.front() == "<|end|>");
  CHECK(tokenizer.tokens.back() == "Ġé");
  CHECK(tokenizer.merges == std::vector<std::string>{"t 1", "Ġ é"});
  CHECK(tokenizer.scores.empty());
  CHECK(tokenizer.token_types.size() == 64);
  CHECK(tokenizer.token_types.front() == 3);
  CHECK(tokenizer.bos == 1);
  CHECK(tokenizer.eos == 0);
  CHECK_FALSE(tokenizer.unknown.has_value());
  CHECK(tokenizer.add_bos == false);
  CHECK_FALSE(tokenizer.add_space_prefix.has_value());
  CHECK(tokenizer.chat_template == "{{ messages }}");
  CHECK(load_llama_config(gguf_path("quantised")).eos_tokens == std::vector<int>{0, 5});
  CHECK_THROWS_WITH_AS((void)gguf_tokenizer(GgufFile{gguf_path("tied_d64")}),
                       doctest::Contains("tokenizer.ggml.model is missing"), FormatError);
}

// ---- what is refused -------------------------------------------------------------------------

/// A model of two layers with matrices of F32, which tests change before they write it.
struct SmallModel {
  SmallModel() {
    file.entries = {text_entry("general.architecture", "llama"),
                    uint_entry("llama.block_count", 1),
                    uint_entry("llama.embedding_length", 8),
                    uint_entry("llama.feed_forward_length", 16),
                    uint_entry("llama.attention.head_count", 2),
                    uint_entry("llama.attention.head_count_kv", 1),
                    float_entry("llama.attention.layer_norm_rms_epsilon", 1e-5F)};
    add("token_embd.weight", {8, 5});
    add("output_norm.weight", {8});
    add("blk.0.attn_norm.weight", {8});
    add("blk.0.attn_q.weight", {8, 8});
    add("blk.0.attn_k.weight", {8, 4});
    add("blk.0.attn_v.weight", {8, 4});
    add("blk.0.attn_output.weight", {8, 8});
    add("blk.0.ffn_norm.weight", {8});
    add("blk.0.ffn_gate.weight", {8, 16});
    add("blk.0.ffn_up.weight", {8, 16});
    add("blk.0.ffn_down.weight", {16, 8});
  }
  void add(const std::string& name, const std::vector<std::uint64_t>& sizes) {
    file.tensors.push_back({name, sizes, 0, file.data_bytes});
    std::size_t bytes = sizeof(float);
    for (const std::uint64_t size : sizes) bytes *= static_cast<std::size_t>(size);
    file.data_bytes += (bytes + 31) / 32 * 32;
  }
  /// Replaces the entry of a key.
  void set(std::string_view key, const std::string& entry) {
    for (std::string& own : file.entries) {
      if (own.starts_with(text_bytes(key))) own = entry;
    }
  }

  GgufBytes file;
};

/// The type and text of the refusal of the small model after a change, "" if it is loaded.
std::string refusal(void (*change)(SmallModel&)) {
  SmallModel model;
  change(model);
  const testing::TemporaryFolder folder;
  folder.write("m.gguf", model.file.text());
  try {
    (void)Llama::load(folder / "m.gguf");
  } catch (const ConfigError& error) {
    return std::string{"ConfigError "} + error.what();
  } catch (const FormatError& error) {
    return std::string{"FormatError "} + error.what();
  }
  return "";
}

struct Case {
  std::string type, part;
  void (*change)(SmallModel&);
};

TEST_CASE("models that cannot be computed are refused by what is wrong with them") {
  REQUIRE(refusal([](SmallModel&) {}) == "");
  const std::vector<Case> cases{
      {"ConfigError", "architecture 'gemma3' is not supported, expected llama",
       [](SmallModel& m) { m.file.entries[0] = text_entry("general.architecture", "gemma3"); }},
      {"FormatError", "general.architecture is missing",
       [](SmallModel& m) { m.file.entries.erase(m.file.entries.begin()); }},
      {"ConfigError", "has 8 experts in each layer; mixtures of experts are not supported",
       [](SmallModel& m) { m.file.entries.push_back(uint_entry("llama.expert_count", 8)); }},
      {"ConfigError", "metadata 'llama.attention.scale' is a setting that this model does not compute",
       [](SmallModel& m) { m.file.entries.push_back(float_entry("llama.attention.scale", 0.5F)); }},
      {"ConfigError", "attention.causal is false",
       [](SmallModel& m) {
         m.file.entries.push_back(entry_bytes("llama.attention.causal", 7, std::string_view{"\0", 1}));
       }},
      {"ConfigError", "rope.scaling.type 'yarn' is not supported",
       [](SmallModel& m) { m.file.entries.push_back(text_entry("llama.rope.scaling.type", "yarn")); }},
      {"ConfigError", "tensor rope_freqs.weight does not hold the divisors",
       [](SmallModel& m) { m.add("rope_freqs.weight", {2}); }},
      {"ConfigError", "rope.dimension_count is 2, expected the head_dim 4",
       [](SmallModel& m) { m.file.entries.push_back(uint_entry("llama.rope.dimension_count", 2)); }},
      {"ConfigError", "block_count is 0",
       [](SmallModel& m) { m.set("llama.block_count", uint_entry("llama.block_count", 0)); }},
      {"ConfigError", "block_count is 70000",
       [](SmallModel& m) { m.set("llama.block_count", uint_entry("llama.block_count", 70000)); }},
      {"FormatError", "llama.block_count is '1', expected a whole number",
       [](SmallModel& m) { m.set("llama.block_count", text_entry("llama.block_count", "1")); }},
      {"ConfigError", "head_count is 0",
       [](SmallModel& m) {
         m.set("llama.attention.head_count", uint_entry("llama.attention.head_count", 0));
       }},
      {"FormatError", "layer_norm_rms_epsilon is missing", [](SmallModel& m) { m.file.entries.pop_back(); }},
      {"FormatError", "eos_token_id is 5, expected a token below 5",
       [](SmallModel& m) { m.file.entries.push_back(uint_entry("tokenizer.ggml.eos_token_id", 5)); }},
      {"FormatError", "has no matrix token_embd.weight", [](SmallModel& m) { m.file.tensors[0].name = "x"; }},
      {"FormatError", "has no tensor for 'model.layers.0.self_attn.k_proj.weight' of shape [4, 8]",
       [](SmallModel& m) { m.file.tensors[4].name = "blk.0.attn_k.x"; }},
      {"FormatError", "tensor for 'model.norm.weight': shape is [7], the metadata needs [8]",
       [](SmallModel& m) { m.file.tensors[1].sizes = {7}; }},
      {"FormatError", "has no tensor for 'model.layers.1.input_layernorm.weight'",
       [](SmallModel& m) { m.set("llama.block_count", uint_entry("llama.block_count", 2)); }},
      {"FormatError", "two tensors for 'model.norm.weight', one is 'output_norm.weight'",
       [](SmallModel& m) { m.add("model.norm.weight", {8}); }},
      {"FormatError", "tensor 'blk.0.ffn_gate_inp.weight' has no place in the model",
       [](SmallModel& m) { m.add("blk.0.ffn_gate_inp.weight", {8}); }},
      {"FormatError", "tensor 'model.layers.0.self_attn.k_proj.bias' has no place",
       [](SmallModel& m) { m.add("blk.0.attn_k.bias", {4}); }},
  };
  for (const Case& test : cases) {
    const std::string text = refusal(test.change);
    CAPTURE(test.part);
    CAPTURE(text);
    CHECK(text.starts_with(test.type));
    CHECK(text.find(test.part) != std::string::npos);
    CHECK(text.find("m.gguf") != std::string::npos);
  }
}

TEST_CASE("a weight that is not finite is named; a file that is no model is refused") {
  SmallModel model;
  std::string text = model.file.text();
  // The last number of the last tensor, which ends with the file.
  text.replace(text.size() - 4, 4, std::string_view{"\0\0\xc0\x7f", 4});
  const testing::TemporaryFolder folder;
  folder.write("m.gguf", text);
  CHECK_THROWS_WITH_AS(
      (void)Llama::load(folder / "m.gguf"),
      doctest::Contains("'model.layers.0.mlp.down_proj.weight': element 127 is NaN or infinite"),
      FormatError);
  folder.write("config.json", "{}");
  CHECK_THROWS_WITH_AS((void)Llama::load(folder / "config.json"), doctest::Contains("is not a GGUF file"),
                       FormatError);
  CHECK_THROWS_AS((void)Llama::load(folder / "none.gguf"), FormatError);
}

TEST_CASE("a sliding window and rotary scaling of a file") {
  SmallModel model;
  model.file.entries.push_back(uint_entry("llama.attention.sliding_window", 3));
  model.file.entries.push_back(text_entry("llama.rope.scaling.type", "linear"));
  model.file.entries.push_back(float_entry("llama.rope.scaling.factor", 4.0F));
  model.file.entries.push_back(float_entry("llama.rope.freq_base", 5e5F));
  const testing::TemporaryFolder folder;
  folder.write("m.gguf", model.file.text());
  const LlamaConfig config = load_llama_config(folder / "m.gguf");
  CHECK(config.windows == std::vector<std::size_t>{3});
  CHECK(config.rotary == RotaryConfig{.theta = 5e5, .scaling = RotaryConfig::Scaling::linear, .factor = 4.0});
  CHECK(config.tied_embeddings);
}

TEST_CASE("divisors of rotary frequencies are Llama 3's for any original length") {
  const testing::TemporaryFolder folder;
  const auto write = [&](SmallModel& model) {
    model.file.entries.push_back(float_entry("llama.rope.freq_base", 1e6F));
    model.add("rope_freqs.weight", {2});
    std::string bytes = model.file.text();
    // Wavelengths of 6 and 6,283 tokens, of which only the second is longer than an original length of 4,096.
    constexpr std::array divisors{1.0F, 8.0F};
    std::memcpy(bytes.data() + bytes.size() - 32, divisors.data(), sizeof divisors);
    folder.write("m.gguf", bytes);
  };
  SmallModel model;
  write(model);
  const RotaryConfig rotary = load_llama_config(folder / "m.gguf").rotary;
  CHECK(rotary.scaling == RotaryConfig::Scaling::llama3);
  CHECK(rotary.factor == 8.0);
  CHECK(rotary.original_max_position <= 4096.0);
  const std::vector<float> plain = inverse_frequencies(RotaryConfig{.theta = 1e6}, 4);
  const std::vector<float> scaled = inverse_frequencies(rotary, 4);
  CHECK(scaled[0] == plain[0]);
  CHECK(scaled[1] == doctest::Approx(plain[1] / 8));

  SmallModel other;
  other.file.entries.push_back(uint_entry("llama.rope.scaling.original_context_length", 8192));
  write(other);
  CHECK_THROWS_WITH_AS((void)load_llama_config(folder / "m.gguf"),
                       doctest::Contains("an original length of 8192)"), ConfigError);
}

TEST_CASE("a factor of rotary scaling without a type is linear, as in llama.cpp") {
  for (const float factor : {1.0F, 4.0F}) {
    SmallModel model;
    model.file.entries.push_back(float_entry("llama.rope.scaling.factor", factor));
    const testing::TemporaryFolder folder;
    folder.write("m.gguf", model.file.text());
    const RotaryConfig rotary = load_llama_config(folder / "m.gguf").rotary;
    CHECK(rotary.scaling == (factor == 1.0F ? RotaryConfig::Scaling::none : RotaryConfig::Scaling::linear));
    CHECK(rotary.factor == factor);
  }
}

TEST_CASE("a setting of a tokenizer that would change tokens and is not known is refused") {
  const auto said = [](const std::string& entry) -> std::string {
    SmallModel model;
    model.file.entries.push_back(text_entry("tokenizer.ggml.model", "llama"));
    model.file.entries.push_back(entry_bytes("tokenizer.ggml.tokens", 9, array_bytes(8, 1, text_bytes("a"))));
    model.file.entries.push_back(entry);
    const testing::TemporaryFolder folder;
    folder.write("m.gguf", model.file.text());
    try {
      (void)gguf_tokenizer(GgufFile{folder / "m.gguf"});
    } catch (const FormatError& error) {
      return error.what();
    }
    return "";
  };
  const auto flag = [](std::string_view key, char value) {
    return entry_bytes(key, 7, std::string(1, value));
  };
  CHECK(said(text_entry("tokenizer.ggml.tokens_of_old", "x")) ==
        testing::Says{"'tokenizer.ggml.tokens_of_old'"});
  CHECK(said(entry_bytes("tokenizer.ggml.precompiled_charsmap", 9, array_bytes(0, 1, "x"))) ==
        testing::Says{"precompiled_charsmap"});
  for (const char* key : {"tokenizer.ggml.add_sep_token", "tokenizer.ggml.remove_extra_whitespaces"}) {
    CHECK(said(flag(key, 1)) == testing::Says{key});
    CHECK(said(flag(key, 0)).empty());
  }
  CHECK(said(uint_entry("tokenizer.ggml.padding_token_id", 0)).empty());
  CHECK(said(text_entry("tokenizer.huggingface.json", "{}")).empty());
  CHECK(said(text_entry("tokenizer.chat_template.tool_use", "x")).empty());
}

}  // namespace
}  // namespace kvpolicy::reference::gguf_model_test
