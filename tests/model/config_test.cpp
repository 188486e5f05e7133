// SPDX-License-Identifier: Apache-2.0
//
// config.json in all spellings in use; configs that the model cannot compute are refused by name.
#include <cstddef>
#include <filesystem>
#include <fstream>
#include <string>
#include <vector>

#include <doctest/doctest.h>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/error.hpp>
#include <reference_model/config.hpp>
#include <reference_model/llama.hpp>

#include "model/golden.hpp"
#include "support/temporary_folder.hpp"

namespace kvpolicy::reference::config_test {
namespace {

using Json = nlohmann::json;

Json smallest() {
  return {{"architectures", {"LlamaForCausalLM"}},
          {"vocab_size", 64},
          {"hidden_size", 128},
          {"intermediate_size", 96},
          {"num_hidden_layers", 2},
          {"num_attention_heads", 2}};
}

LlamaConfig parse(const Json& json) { return parse_llama_config(json.dump(), "config.json"); }

/// Parses a config after setting one value, and checks that the error contains `part`.
template <class E = ConfigError>
void refuses(const std::string& key, const Json& value, const std::string& part) {
  Json json = smallest();
  json[key] = value;
  CAPTURE(key);
  CAPTURE(value.dump());
  try {
    (void)parse(json);
    FAIL_CHECK("accepted");
  } catch (const E& error) {
    const std::string text = error.what();
    CHECK_MESSAGE(text.find("config.json: ") == 0, text);
    CHECK_MESSAGE(text.find(part) != std::string::npos, text);
  }
}

TEST_CASE("missing keys have the defaults of transformers") {
  const LlamaConfig config = parse(smallest());
  CHECK(config.kv_heads == 2);
  CHECK(config.head_dim == 64);
  CHECK(config.rotary.theta == 10000.0);
  CHECK(config.rotary.scaling == RotaryConfig::Scaling::none);
  CHECK(config.norm_eps == 1e-6F);
  CHECK_FALSE(config.tied_embeddings);
  CHECK_FALSE(config.qkv_bias);
  CHECK(config.windows == std::vector<std::size_t>{0, 0});
  CHECK(config.eos_tokens.empty());
  Json json = smallest();
  json.erase("architectures");
  json["model_type"] = "llama";
  json["head_dim"] = nullptr;
  CHECK(parse(json).head_dim == 64);
}

TEST_CASE("rotary settings are read in both spellings") {
  Json old = smallest();
  old["rope_theta"] = 500000.0;
  old["rope_scaling"] = {{"rope_type", "llama3"},
                         {"factor", 32.0},
                         {"low_freq_factor", 1.0},
                         {"high_freq_factor", 4.0},
                         {"original_max_position_embeddings", 8192}};
  Json renewed = smallest();
  renewed["rope_parameters"] = old["rope_scaling"];
  renewed["rope_parameters"]["rope_theta"] = 500000.0;
  const RotaryConfig expected{.theta = 500000.0,
                              .scaling = RotaryConfig::Scaling::llama3,
                              .factor = 32.0,
                              .low_freq_factor = 1.0,
                              .high_freq_factor = 4.0,
                              .original_max_position = 8192.0};
  CHECK(parse(old).rotary == expected);
  CHECK(parse(renewed).rotary == expected);

  Json linear = smallest();
  // Phi-like files have it beside the scaling, which transformers takes first; it takes the model's own length last.
  old["original_max_position_embeddings"] = 4096;
  CHECK(parse(old).rotary.original_max_position == 4096.0);
  old.erase("original_max_position_embeddings");
  old["rope_scaling"].erase("original_max_position_embeddings");
  old["max_position_embeddings"] = 2048;
  CHECK(parse(old).rotary.original_max_position == 2048.0);
  linear["rope_scaling"] = {{"type", "linear"}, {"factor", 2.0}};
  CHECK(parse(linear).rotary.scaling == RotaryConfig::Scaling::linear);
  CHECK(parse(linear).rotary.factor == 2.0);
}

// transformers 5 uses `rope_scaling or rope_parameters`, and theta from the object that it uses.
TEST_CASE("of two rotary settings only the older one is used, unless it is empty") {
  Json both = smallest();
  both["rope_parameters"] = {{"rope_type", "linear"}, {"factor", 2.0}, {"rope_theta", 500000.0}};
  both["rope_scaling"] = {{"rope_type", "linear"}, {"factor", 4.0}};
  CHECK(parse(both).rotary.factor == 4.0);
  CHECK(parse(both).rotary.theta == 10000.0);
  both["rope_theta"] = 70000.0;
  CHECK(parse(both).rotary.theta == 70000.0);
  both["rope_scaling"]["rope_theta"] = 80000.0;
  CHECK(parse(both).rotary.theta == 80000.0);
  both["rope_scaling"] = {{"rope_type", "default"}};
  CHECK(parse(both).rotary.scaling == RotaryConfig::Scaling::none);
  for (const Json& none : {Json{}, Json::object()}) {
    both["rope_scaling"] = none;
    CHECK(parse(both).rotary.factor == 2.0);
    CHECK(parse(both).rotary.theta == 500000.0);
  }
  both["rope_parameters"] = Json::object();
  CHECK(parse(both).rotary.theta == 70000.0);
  CHECK(parse(both).rotary.scaling == RotaryConfig::Scaling::none);
}

TEST_CASE("windows follow transformers: Mistral's all layers, Qwen2's upper ones, Llama's none") {
  Json json = smallest();
  json["sliding_window"] = 32;
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 0});
  json["architectures"] = {"MistralForCausalLM"};
  CHECK(parse(json).windows == std::vector<std::size_t>{32, 32});
  json.erase("sliding_window");
  CHECK(parse(json).windows == std::vector<std::size_t>{4096, 4096});
  json["sliding_window"] = nullptr;
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 0});
  json["sliding_window"] = 32;
  json["architectures"] = {"Qwen2ForCausalLM"};
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 0});
  json["use_sliding_window"] = true;
  json["max_window_layers"] = 1;
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 32});
  json["layer_types"] = {"sliding_attention", "full_attention"};
  CHECK(parse(json).windows == std::vector<std::size_t>{32, 0});
  CHECK(parse(json).qkv_bias);
  CHECK_FALSE(parse(json).o_bias);
  json.erase("sliding_window");
  CHECK(parse(json).windows == std::vector<std::size_t>{4096, 0});
  json["sliding_window"] = nullptr;
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 0});
  json["sliding_window"] = 32;
  json["layer_types"] = {"sliding_attention", "linear_attention"};
  CHECK_THROWS_AS((void)parse(json), ConfigError);
  json["layer_types"] = {"sliding_attention"};
  CHECK_THROWS_AS((void)parse(json), ConfigError);
}

TEST_CASE("Ministral has windows in the layers that the file names; Mistral and Llama know no layers") {
  Json json = smallest();
  json["sliding_window"] = 32;
  json["architectures"] = {"MinistralForCausalLM"};
  CHECK(parse(json).windows == std::vector<std::size_t>{32, 32});
  CHECK_FALSE(parse(json).qkv_bias);
  json["layer_types"] = {"full_attention", "sliding_attention"};
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 32});
  json["architectures"] = {"MistralForCausalLM"};
  CHECK_THROWS_AS((void)parse(json), ConfigError);
  json["layer_types"] = {"sliding_attention", "sliding_attention"};
  CHECK(parse(json).windows == std::vector<std::size_t>{32, 32});
  json["sliding_window"] = nullptr;
  CHECK_THROWS_AS((void)parse(json), ConfigError);
  json["layer_types"] = {"full_attention", "full_attention"};
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 0});
  json["architectures"] = {"LlamaForCausalLM"};
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 0});
}

TEST_CASE("Qwen3 has norms, a head_dim of its own, no biases unless asked, and windows as Qwen2") {
  Json json = smallest();
  CHECK_FALSE(parse(json).qk_norm);
  json["architectures"] = {"Qwen3ForCausalLM"};
  CHECK(parse(json).qk_norm);
  CHECK(parse(json).head_dim == 128);  // the default of Qwen3Config, not 128 / 2
  CHECK_FALSE(parse(json).qkv_bias);
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 0});
  json["head_dim"] = 32;
  json["num_attention_heads"] = 5;  // does not divide hidden_size
  json["attention_bias"] = true;
  json["use_sliding_window"] = true;
  json["sliding_window"] = 16;
  json["max_window_layers"] = 1;
  CHECK(parse(json).head_dim == 32);
  CHECK(parse(json).qkv_bias);
  CHECK(parse(json).o_bias);
  CHECK_FALSE(parse(json).mlp_bias);
  CHECK(parse(json).windows == std::vector<std::size_t>{0, 16});
  json.erase("architectures");
  json["model_type"] = "qwen3";
  CHECK(parse(json).qk_norm);
}

TEST_CASE("end tokens are one or several") {
  Json json = smallest();
  json["eos_token_id"] = 3;
  CHECK(parse(json).eos_tokens == std::vector<int>{3});
  json["eos_token_id"] = {3, 5};
  CHECK(parse(json).eos_tokens == std::vector<int>{3, 5});
  refuses("eos_token_id", 64, "expected tokens below 64");
}

TEST_CASE("what cannot be computed is refused by name") {
  refuses("architectures", {"GPT2LMHeadModel"}, "'GPT2LMHeadModel' is not supported");
  refuses("architectures", {"MixtralForCausalLM"}, "'MixtralForCausalLM' is not supported");
  refuses("architectures", {"Qwen3MoeForCausalLM"}, "'Qwen3MoeForCausalLM' is not supported");
  refuses("architectures", Json::array(), "expected a list of one name");
  refuses("hidden_act", "gelu", "'gelu' is not supported, expected silu");
  refuses("rope_scaling", {{"type", "yarn"}, {"factor", 2.0}}, "'yarn' is not supported");
  refuses("rope_scaling", {{"type", "linear"}}, "factor is missing");
  refuses("rope_scaling", {{"factor", 8.0}}, "a factor of 8 and no rope_type");
  refuses("rope_parameters", {{"rope_theta", 1e6}, {"factor", 8.0}}, "a factor of 8 and no rope_type");
  refuses("layer_types", {"full_attention", "sliding_attention"}, "MinistralForCausalLM?");
  refuses("rope_scaling", {{"type", "linear"}, {"factor", 0}}, "factor is 0");
  refuses("rope_scaling", "linear", "expected an object");
  refuses("rope_parameters", {{"full_attention", {{"rope_theta", 1e4}}}}, "differ between layers");
  refuses("rope_theta", -1.0, "theta is -1");
  refuses("quantization_config", {{"quant_method", "gptq"}}, "weights quantised by 'gptq'");
  refuses("quantization_config", Json::object(), "weights quantised by 'an unnamed method'");
  refuses("quantization_config", "int8", "expected an object");
  refuses("partial_rotary_factor", 0.5, "partial_rotary_factor is 0.5");
}

TEST_CASE("impossible values are refused with what would fit") {
  for (const char* key :
       {"vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"}) {
    refuses(key, nullptr, std::string(key) + " is missing");
    refuses(key, -1, "'-1', expected a whole number");
    refuses(key, 1.5, "'1.5', expected a whole number");
    refuses(key, "2", "expected a whole number");
    refuses(key, 1ULL << 60, "expected a whole number from 0 to 16777216");
    refuses(key, 0, " is 0");
  }
  refuses("num_hidden_layers", 1 << 20, "expected 1 to 4096");
  refuses("num_attention_heads", 3, "does not divide hidden_size = 128");
  refuses("num_key_value_heads", 3, "multiple of kv_heads = 3");
  refuses("num_key_value_heads", 0, "kv_heads is 0");
  refuses("head_dim", 63, "must be even");
  refuses("head_dim", 0, "head_dim is 0");
  refuses("rms_norm_eps", 0.0, "norm_eps is 0");
  refuses("tie_word_embeddings", 1, "expected true or false");
  Json mistral = smallest();
  mistral["architectures"] = {"MistralForCausalLM"};
  mistral["sliding_window"] = 0;
  CHECK_THROWS_AS((void)parse(mistral), ConfigError);
  CHECK_THROWS_AS((void)parse_llama_config("", "config.json"), FormatError);
  CHECK_THROWS_AS((void)parse_llama_config("[]", "config.json"), FormatError);
  CHECK_THROWS_AS((void)parse_llama_config("{\"hidden_size\":NaN}", "config.json"), FormatError);
  CHECK_THROWS_AS((void)parse_llama_config(std::string(100000, '['), "config.json"), FormatError);
  CHECK_THROWS_AS((void)load_llama_config("/nowhere"), FormatError);
}

TEST_CASE("a config and weights that do not fit are refused") {
  const testing::TemporaryFolder folder;
  const std::string from = golden_folder("mha_d64");
  std::filesystem::copy(from + "/model.safetensors", folder / "model.safetensors");
  std::ifstream file(from + "/config.json");
  const Json good = Json::parse(file);
  const auto refused = [&](const char* key, const Json& value, const std::string& part) {
    Json json = good;
    json[key] = value;
    folder.write("config.json", json.dump());
    try {
      (void)Llama::load(folder.path().string());
    } catch (const FormatError& error) {
      const std::string text = error.what();
      CHECK_MESSAGE(text.find(part) != std::string::npos, text);
      return true;
    }
    return false;
  };
  CHECK_FALSE(refused("use_cache", false, ""));
  CHECK(refused("vocab_size", 65, "'[64, 32]', config.json needs [65, 32]"));
  CHECK(refused("head_dim", 32, "config.json needs [64, 32]"));
  CHECK(refused("num_hidden_layers", 3, "has no tensor 'model.layers.2."));
  CHECK(refused("num_hidden_layers", 1, "has no place in the model"));
  CHECK(refused("attention_bias", true, "has no tensor 'model.layers.0.self_attn.q_proj.bias'"));
  // Many tied checkpoints contain a copy of the embedding under the name of the output layer.
  CHECK_FALSE(refused("tie_word_embeddings", true, ""));
}

TEST_CASE("a model refuses unknown tokens before its caller's cache changes") {
  const Llama model = Llama::load(golden_folder("mha_d64"));
  bool attended = false;
  const AttendFn attend = [&](auto&&...) { attended = true; };
  CHECK_THROWS_AS((void)model.forward(std::vector<int>{1, 64}, 0, attend), ShapeError);
  CHECK_THROWS_AS((void)model.forward(std::vector<int>{-1}, 0, attend), ShapeError);
  CHECK_THROWS_AS((void)model.forward(std::vector<int>{}, 0, attend), ShapeError);
  CHECK_THROWS_AS((void)model.forward(std::vector<int>{1, 2}, std::vector<std::size_t>{0}, attend),
                  ShapeError);
  CHECK_FALSE(attended);
  LlamaConfig config = model.config();
  config.hidden = 33;
  CHECK_THROWS_AS(Llama(config, model.weights()), ShapeError);
}

}  // namespace
}  // namespace kvpolicy::reference::config_test
