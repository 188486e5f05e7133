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
#include <reference_model/config.hpp>
#include <reference_model/gguf.hpp>

#include "error_text.hpp"

namespace kvpolicy::tools {
namespace {

constexpr std::uintmax_t max_config_bytes = 1 << 20;

// A model as its config.json says: num_hidden_layers, num_attention_heads, num_key_value_heads,
// head_dim (or hidden_size / num_attention_heads). Where layers differ, the last one of each
// `every` layers is `layer` and those before it are `others`.
struct KnownModel {
  std::string_view name;
  std::size_t layers;
  LayerShape layer;
  std::size_t every = 1;
  LayerShape others = {};
  bool is_latent = false;  // the channels of a value are the first of its key

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
    // sliding_window 1024, sliding_window_pattern 6
    {"gemma-3-12b", 48, {16, 8, 256}, 6, {.q_heads = 16, .kv_heads = 8, .head_dim = 256, .window = 1024}},
    // sliding_window 128, layer_types: even layers slide
    {"gpt-oss-20b", 24, {64, 8, 64}, 2, {.q_heads = 64, .kv_heads = 8, .head_dim = 64, .window = 128}},
    // full_attention_interval 4; the other layers are linear attention
    {"qwen3-next-80b-a3b", 48, {16, 2, 256}, 4},
    // One latent row for all heads: kv_lora_rank 512 + qk_rope_head_dim 64 channels are keys, the first 512 of
    // them values too.
    {.name = "deepseek-v3", .layers = 61, .layer = {128, 1, 576, 512}, .is_latent = true},
};

// Which layers of a config.json attend to a window only, and which keep no keys and values: `layer_types`
// names each layer, older files give a period: the last layer of each attends to all rows.
// @throws FormatError for a kind of layer that is not known
void limit_layers(ModelShape& shape, const io::Json& config, std::size_t window, const std::string& file) {
  const auto types = config.find("layer_types");
  if (types != config.end() && types->is_array()) {
    require<FormatError>(types->size() == shape.layers, file, ": layer_types has ", types->size(),
                         " entries, num_hidden_layers is ", shape.layers);
    for (std::size_t l = 0; l < shape.layers; ++l) {
      const std::string type = (*types)[l].is_string() ? (*types)[l].get<std::string>() : "";
      if (type == "sliding_attention") {
        require<FormatError>(window > 0, file, ": layer ", l, " slides, but sliding_window is missing");
        shape.change(l).window = window;
      } else if (type == "linear_attention") {
        shape.change(l) = {};
      } else {
        require<FormatError>(type == "full_attention", file, ": layer_types, layer ", l, ": is ",
                             io::shown((*types)[l]),
                             ", must be full_attention, sliding_attention or "
                             "linear_attention");
      }
    }
    return;
  }
  const auto count = [&](const char* key) -> std::size_t {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) return 0;
    return io::JsonObject::as_count(*found, message(file, ", ", key), std::size_t{1} << 20);
  };
  const std::size_t linear_period = count("full_attention_interval");
  for (std::size_t l = 0; linear_period > 0 && l < shape.layers; ++l) {
    if ((l + 1) % linear_period != 0) shape.change(l) = {};
  }
  // Qwen2 and Qwen3 write down a window that they do not use.
  const auto used = config.find("use_sliding_window");
  if (window == 0 || (used != config.end() && *used == false)) return;
  const std::size_t first = used == config.end() ? 0 : count("max_window_layers");
  const std::size_t period = count("sliding_window_pattern");
  for (std::size_t l = first; l < shape.layers; ++l) {
    if (period == 0 || (l + 1) % period != 0) shape.change(l).window = window;
  }
}

// What a config.json of transformers says of the cache, whatever else the model computes.
ModelShape shape_in(const std::filesystem::path& folder) {
  const std::filesystem::path file = folder / "config.json";
  const io::Json json = io::parse_json(io::read_text_file(file, max_config_bytes), file.string());
  // Models with other parts have one config for each.
  const bool nested = json.is_object() && json.contains("text_config");
  const io::Json& config = nested ? json["text_config"] : json;
  require<FormatError>(config.is_object(), file.string(), ": must be an object, is ", io::shown(config));
  const auto number = [&](const char* key, std::size_t otherwise) {
    const auto found = config.find(key);
    if (found == config.end() || found->is_null()) {
      require<FormatError>(otherwise > 0, file.string(), ": ", key, " is missing");
      return otherwise;
    }
    return io::JsonObject::as_count(*found, message(file.string(), ", ", key), std::size_t{1} << 20);
  };
  const auto number_or_0 = [&](const char* key) -> std::size_t {
    return config.contains(key) && !config[key].is_null() ? number(key, 0) : 0;
  };
  ModelShape shape;
  shape.layers = number("num_hidden_layers", 0);
  shape.q_heads = number("num_attention_heads", 0);
  require<FormatError>(shape.q_heads > 0, file.string(), ": num_attention_heads is 0");
  shape.kv_heads = number("num_key_value_heads", shape.q_heads);
  const bool own = config.contains("head_dim") && !config["head_dim"].is_null();
  shape.head_dim = own ? number("head_dim", 0) : number("hidden_size", 0) / shape.q_heads;
  require<FormatError>(!config.contains("kv_lora_rank") || config["kv_lora_rank"].is_null(), file.string(),
                       ": the model caches one latent row for all heads (kv_lora_rank), which its numbers of "
                       "heads do not describe; of these the tools know deepseek-v3 by name");
  limit_layers(shape, config, number_or_0("sliding_window"), file.string());
  return named_by(file.string(), [&] { return (shape.validate(), shape); });
}

}  // namespace

ModelShape parse_shape(const std::string& text) {
  // As the models' authors write them, or in small letters.
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
  if (reference::is_gguf(text)) {
    const reference::LlamaConfig config = reference::load_llama_config(text);
    ModelShape shape = config.shape();
    for (std::size_t l = 0; l < shape.layers; ++l) {
      if (config.windows[l] > 0) shape.change(l).window = config.windows[l];
    }
    return named_by(text, [&] { return (shape.validate(), shape); });
  }
  throw ConfigError(message("--shape ", text, ": is neither a model folder or GGUF file, nor four numbers ",
                            "layers,q_heads,kv_heads,head_dim, nor one of\n", known_shapes()));
}

std::string latent_note(const ModelShape& shape) {
  const bool is_latent = std::ranges::any_of(
      models, [&](const KnownModel& model) { return model.is_latent && model.shape() == shape; });
  if (!is_latent) return {};
  const std::size_t keys = shape.head_dim;
  return fmt::format(
      "the latent counts twice, as {} channels of a key and {} of a value: a cache keeps both. An "
      "engine that keeps the latent once (MLA) holds {} channels, {:.2f}x less in a full cache",
      keys, shape.value_dim, keys, static_cast<double>(keys + shape.value_dim) / static_cast<double>(keys));
}

std::string known_shapes() {
  std::string text;
  for (const KnownModel& model : models) {
    const LayerShape& layer = model.layer;
    text += fmt::format("  {:<20}{},{},{},{}", model.name, model.layers, layer.q_heads, layer.kv_heads,
                        layer.head_dim);
    if (layer.value_dim != 0) text += fmt::format("; values of {}", layer.value_dim);
    if (model.others.window != 0) {
      text += fmt::format("; {} layers with a window of {}", model.count_others(), model.others.window);
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
  // Written so that NaN fails.
  require(error == std::errc{} && known && bytes >= 1.0 && bytes <= 0x1p62, "'", text,
          "' is not a size; write 80GB, 80GiB, 512MB or a number of bytes");
  return static_cast<std::size_t>(bytes);
}

}  // namespace kvpolicy::tools
