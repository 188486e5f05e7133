// SPDX-License-Identifier: Apache-2.0
#include "model_sizes.hpp"

#include <algorithm>
#include <array>
#include <charconv>
#include <cmath>
#include <cstdint>
#include <filesystem>
#include <string_view>

#include <fmt/format.h>

#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>

#include "error_text.hpp"

namespace kvpolicy::tools {
namespace {

constexpr std::uintmax_t max_config_bytes = 1 << 20;

// A model as described by its config.json: num_hidden_layers, num_attention_heads,
// num_key_value_heads, head_dim (or hidden_size / num_attention_heads). Where layers differ, the
// last one of each `every` layers is `layer` and those before it are `others`.
struct KnownModel {
  std::string_view name;
  std::size_t layers;
  LayerShape layer;
  std::size_t every = 1;
  LayerShape others = {};

  [[nodiscard]] ModelShape shape() const {
    ModelShape shape{layers, layer.q_heads, layer.kv_heads, layer.head_dim, layer.value_dim};
    for (std::size_t l = 0; l < layers; ++l) {
      if ((l + 1) % every != 0) shape.change(l) = others;
    }
    return shape;
  }
  [[nodiscard]] std::size_t count_others() const { return layers - layers / every; }
};

constexpr KnownModel models[]{
    {"llama-2-7b", 32, {32, 32, 128}},
    {"llama-2-13b", 40, {40, 40, 128}},
    {"llama-2-70b", 80, {64, 8, 128}},
    {"llama-3-8b", 32, {32, 8, 128}},
    {"llama-3-70b", 80, {64, 8, 128}},
    {"llama-3.1-8b", 32, {32, 8, 128}},
    {"llama-3.1-70b", 80, {64, 8, 128}},
    {"llama-3.1-405b", 126, {128, 8, 128}},
    {"llama-3.2-1b", 16, {32, 8, 64}},
    {"llama-3.2-3b", 28, {24, 8, 128}},
    {"mistral-7b", 32, {32, 8, 128}},
    {"mixtral-8x7b", 32, {32, 8, 128}},
    {"mistral-small-24b", 40, {32, 8, 128}},
    {"qwen2.5-7b", 28, {28, 4, 128}},
    {"qwen2.5-32b", 64, {40, 8, 128}},
    {"qwen2.5-72b", 80, {64, 8, 128}},
    {"qwen3-8b", 36, {32, 8, 128}},
    {"phi-4", 40, {40, 10, 128}},
    {"smollm2-135m", 30, {9, 3, 64}},
    // Gemma 3: sliding_window 1024, sliding_window_pattern 6
    {"gemma-3-12b",
     48,
     {16, 8, 256},
     6,
     {.q_heads = 16, .kv_heads = 8, .head_dim = 256, .window = 1024}},
    // gpt-oss: sliding_window 128; layer_types: even layers use the window
    {"gpt-oss-20b",
     24,
     {64, 8, 64},
     2,
     {.q_heads = 64, .kv_heads = 8, .head_dim = 64, .window = 128}},
    // Qwen3-Next: full_attention_interval 4; the other layers are linear attention and keep no rows
    {"qwen3-next-80b-a3b", 48, {16, 2, 256}, 4},
    // DeepSeek keeps one latent row for all heads: kv_lora_rank 512 + qk_rope_head_dim 64 channels
    // are the key, and the first 512 of them the value. A cache of ours stores those twice; an
    // engine that stores the latent once needs only the keys.
    {"deepseek-v3", 61, {128, 1, 576, 512}},
};

// Reads the four numbers that every config.json of transformers has.
ModelShape shape_in(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "config.json";
  const io::Json json = io::parse_json(io::read_text_file(file, max_config_bytes), file.string());
  // Models with several parts (vision, text) have a config for each.
  const bool nested = json.is_object() && json.contains("text_config");
  const io::Json& config = nested ? json["text_config"] : json;
  require<FormatError>(config.is_object(), file.string(), ": must be an object, is ",
                       io::shown(config));
  const auto number = [&](const char* key, std::size_t otherwise) {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) {
      require<FormatError>(otherwise > 0, file.string(), ": ", key, " is missing");
      return otherwise;
    }
    return io::JsonObject::as_count(*found, message(file.string(), ", ", key),
                                    std::size_t{1} << 20);
  };
  ModelShape shape;
  shape.layers = number("num_hidden_layers", 0);
  shape.q_heads = number("num_attention_heads", 0);
  require<FormatError>(shape.q_heads > 0, file.string(), ": num_attention_heads is 0");
  shape.kv_heads = number("num_key_value_heads", shape.q_heads);
  const bool own = config.contains("head_dim") && !config["head_dim"].is_null();
  shape.head_dim = own ? number("head_dim", 0) : number("hidden_size", 0) / shape.q_heads;
  return named_by(file.string(), [&] { return (shape.validate(), shape); });
}

}  // namespace

ModelShape parse_shape(const std::string& text) {
  // Names are accepted as the models' authors write them, or in lower case.
  std::string small = text;
  std::ranges::transform(small, small.begin(), [](char letter) {
    return letter >= 'A' && letter <= 'Z' ? static_cast<char>(letter - 'A' + 'a') : letter;
  });
  for (const KnownModel& model : models) {
    if (model.name == small) return model.shape();
  }
  std::array<std::size_t, 4> numbers{};
  const char* at = text.data();
  const char* end = at + text.size();
  bool four = true;
  for (std::size_t i = 0; i < 4 && four; ++i) {
    const auto [next, error] = std::from_chars(at, end, numbers[i]);
    four = error == std::errc{} && (i == 3 ? next == end : next != end && *next == ',');
    at = next + (i == 3 ? 0 : 1);
  }
  if (four) {
    const ModelShape shape{numbers[0], numbers[1], numbers[2], numbers[3]};
    return named_by("--shape " + text, [&] { return (shape.validate(), shape); });
  }
  std::error_code ignored;
  if (std::filesystem::is_directory(text, ignored)) {
    return shape_in(text);
  }
  throw ConfigError(message("--shape ", text, ": is neither a model folder, nor four numbers ",
                            "layers,q_heads,kv_heads,head_dim, nor one of\n", known_shapes()));
}

std::string known_shapes() {
  std::string text;
  for (const KnownModel& model : models) {
    const LayerShape& layer = model.layer;
    text += fmt::format("  {:<20}{},{},{},{}", model.name, model.layers, layer.q_heads,
                        layer.kv_heads, layer.head_dim);
    if (layer.value_dim != 0) text += fmt::format("; values of {}", layer.value_dim);
    if (model.others.window != 0) {
      text +=
          fmt::format("; {} layers with a window of {}", model.count_others(), model.others.window);
    } else if (model.every > 1) {
      text += fmt::format("; {} layers without a cache", model.count_others());
    }
    text += '\n';
  }
  return text;
}

std::size_t parse_bytes(const std::string& text) {
  double number = 0.0;
  const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), number);
  std::string_view unit{end, static_cast<std::size_t>(text.data() + text.size() - end)};
  while (unit.starts_with(' ')) unit.remove_prefix(1);
  constexpr std::string_view letters = "KMGT";
  double scale = 1.0;
  bool known = unit.empty() || unit == "B";
  if (!known) {
    const std::size_t power = letters.find(unit.front());
    const std::string_view rest = unit.substr(1);
    known = power != std::string_view::npos && (rest.empty() || rest == "B" || rest == "iB");
    if (known) scale = std::pow(rest == "iB" ? 1024.0 : 1000.0, static_cast<double>(power + 1));
  }
  const double bytes = number * scale;
  // The condition is written so that NaN fails.
  require(error == std::errc{} && known && bytes >= 1.0 && bytes <= 0x1p62, "'", text,
          "' is not a size; write 80GB, 80GiB, 512MB or a number of bytes");
  return static_cast<std::size_t>(bytes);
}

}  // namespace kvpolicy::tools
