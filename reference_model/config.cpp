// SPDX-License-Identifier: Apache-2.0
#include <reference_model/config.hpp>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <optional>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <reference_model/gguf_model.hpp>

namespace kvpolicy::reference {
namespace {

using io::Json;

constexpr std::size_t max_config_bytes = 1 << 20;
// Far more than any model has, and small enough that a product of two sizes cannot overflow.
constexpr std::size_t largest_size = std::size_t{1} << 24;

/// One JSON object of the file. `null` counts as missing, as it does in transformers.
class Fields {
 public:
  Fields(const Json& json, std::string_view origin) : json_{json}, origin_{origin} {}

  [[nodiscard]] const Json* find(const char* key) const {
    const auto found = json_.find(key);
    return found == json_.end() || found->is_null() ? nullptr : &*found;
  }

  [[nodiscard]] std::size_t size(const char* key, std::optional<std::size_t> fallback = {}) const {
    const Json* value = find(key);
    if (!value && fallback) return *fallback;
    require(value, origin_, ": ", key, " is missing");
    require(value->is_number_unsigned() && value->get<std::uint64_t>() <= largest_size, origin_, ": ", key,
            " is ", io::in_quotes(value->dump()), ", expected a whole number from 0 to ", largest_size);
    return value->get<std::size_t>();
  }

  [[nodiscard]] double number(const char* key, std::optional<double> fallback = {}) const {
    const Json* value = find(key);
    if (!value && fallback) return *fallback;
    require(value, origin_, ": ", key, " is missing");
    require(value->is_number(), origin_, ": ", key, " is ", io::in_quotes(value->dump()),
            ", expected a number");
    return value->get<double>();
  }

  [[nodiscard]] bool flag(const char* key, bool fallback) const {
    const Json* value = find(key);
    if (!value) return fallback;
    require(value->is_boolean(), origin_, ": ", key, " is ", io::in_quotes(value->dump()),
            ", expected true or false");
    return value->get<bool>();
  }

  [[nodiscard]] std::string text(const char* key, const std::string& fallback) const {
    const Json* value = find(key);
    if (!value) return fallback;
    require(value->is_string(), origin_, ": ", key, " is ", io::in_quotes(value->dump()),
            ", expected a text");
    return value->get<std::string>();
  }

  [[nodiscard]] std::optional<Fields> object(const char* key) const {
    const Json* value = find(key);
    if (!value) return std::nullopt;
    require(value->is_object(), origin_, ": ", key, " is ", io::in_quotes(value->dump()),
            ", expected an object");
    return Fields{*value, origin_};
  }

  /// Whether the file says `null`, for keys where that differs from a missing key.
  [[nodiscard]] bool is_null(const char* key) const {
    const auto found = json_.find(key);
    return found != json_.end() && found->is_null();
  }
  [[nodiscard]] bool empty() const { return json_.empty(); }
  [[nodiscard]] std::string_view origin() const { return origin_; }

 private:
  const Json& json_;
  std::string_view origin_;
};

enum class Family { llama, mistral, ministral, qwen2, qwen3 };

Family family_of(const Fields& config) {
  std::string name = config.text("model_type", "");
  if (const Json* list = config.find("architectures")) {
    require(list->is_array() && list->size() == 1 && list->front().is_string(), config.origin(),
            ": architectures is ", io::in_quotes(list->dump()), ", expected a list of one name");
    name = list->front().get<std::string>();
  }
  if (name == "LlamaForCausalLM" || name == "llama") return Family::llama;
  if (name == "MistralForCausalLM" || name == "mistral") return Family::mistral;
  if (name == "MinistralForCausalLM" || name == "ministral") return Family::ministral;
  if (name == "Qwen2ForCausalLM" || name == "qwen2") return Family::qwen2;
  if (name == "Qwen3ForCausalLM" || name == "qwen3") return Family::qwen3;
  throw ConfigError(message(config.origin(), ": architecture ", io::in_quotes(name),
                            " is not supported, expected LlamaForCausalLM, MistralForCausalLM, "
                            "MinistralForCausalLM, Qwen2ForCausalLM or Qwen3ForCausalLM"));
}

RotaryConfig rotary_of(const Fields& config) {
  // transformers 5 keeps all settings in rope_parameters. In older files rope_theta is a key of its
  // own and rope_scaling is null for plain rotation; the kind of scaling is named by `type` or,
  // later, by `rope_type`. Where a file has both objects, transformers takes only the older one,
  // unless it is empty.
  const std::optional<Fields> older = config.object("rope_scaling");
  const bool use_older = older && !older->empty();
  const std::optional<Fields> scaling = use_older ? older : config.object("rope_parameters");
  RotaryConfig rotary;
  const double theta = config.number("rope_theta", 10000.0);
  rotary.theta = scaling ? scaling->number("rope_theta", theta) : theta;
  const double share = config.number("partial_rotary_factor", 1.0);
  const double rotated_share = scaling ? scaling->number("partial_rotary_factor", share) : share;
  require(rotated_share == 1.0, config.origin(), ": partial_rotary_factor is ", rotated_share,
          ", expected 1: every channel is rotated");
  if (!scaling) return rotary;
  // Gemma-like models have one set of settings per type of layer. If these were read as one set,
  // theta would be missed.
  for (const char* type : {"full_attention", "sliding_attention"}) {
    require(!scaling->find(type), config.origin(), ": rotary settings differ between layers (", type,
            "), expected one set for all");
  }

  const std::string kind = scaling->text("rope_type", scaling->text("type", "default"));
  if (kind == "default") {
    require(scaling->number("factor", 1.0) == 1.0, config.origin(), ": the rotary scaling has a factor of ",
            scaling->number("factor", 1.0), " and no rope_type, expected one: linear or llama3");
    return rotary;
  }
  if (kind == "linear") {
    rotary.scaling = RotaryConfig::Scaling::linear;
    rotary.factor = scaling->number("factor");
  } else if (kind == "llama3") {
    rotary.scaling = RotaryConfig::Scaling::llama3;
    rotary.factor = scaling->number("factor");
    rotary.low_freq_factor = scaling->number("low_freq_factor");
    rotary.high_freq_factor = scaling->number("high_freq_factor");
    // transformers takes the one beside the scaling first, and the model's own where there is none.
    constexpr const char* original = "original_max_position_embeddings";
    const double of_model = config.number("max_position_embeddings", RotaryConfig{}.original_max_position);
    rotary.original_max_position = config.number(original, scaling->number(original, of_model));
  } else {
    throw ConfigError(message(config.origin(), ": rope_type ", io::in_quotes(kind),
                              " is not supported, expected default, linear or llama3"));
  }
  return rotary;
}

/// transformers gives Mistral one window for all layers. Ministral, Qwen2 and Qwen3 have windows in the layers that
/// `layer_types` names; where that is missing, Ministral has them in all layers and the others in those from max_window_layers
/// on. Llama has none. A file without sliding_window means 4,096; null means none.
std::vector<std::size_t> windows_of(const Fields& config, Family family, std::size_t layers) {
  std::vector<std::size_t> windows(layers, 0);
  const Json* types = config.find("layer_types");
  if (family == Family::llama || family == Family::mistral) {
    // Both read none, whatever a file says.
    const char* all = family == Family::mistral && !config.is_null("sliding_window") ? "sliding_attention"
                                                                                     : "full_attention";
    const bool same = !types || (types->is_array() &&
                                 std::ranges::all_of(*types, [&](const Json& type) { return type == all; }));
    require(same, config.origin(), ": layer_types is ", io::in_quotes(types ? types->dump() : ""),
            ", but this architecture has the same attention in all layers; is it MinistralForCausalLM?");
  }
  const bool used = family == Family::mistral || family == Family::ministral ||
                    (family != Family::llama && config.flag("use_sliding_window", false));
  if (!used || config.is_null("sliding_window")) return windows;
  const std::size_t window = config.size("sliding_window", 4096);
  require(window > 0, config.origin(), ": sliding_window is 0, expected at least 1, or null");
  if (family == Family::mistral || (family == Family::ministral && !types)) {
    return std::vector<std::size_t>(layers, window);
  }

  if (!types) {
    // The default of transformers' Qwen2Config and Qwen3Config.
    const std::size_t first = config.size("max_window_layers", 28);
    for (std::size_t layer = first; layer < layers; ++layer) windows[layer] = window;
    return windows;
  }
  require(types->is_array() && types->size() == layers, config.origin(), ": layer_types is ",
          io::in_quotes(types->dump()), ", expected a list of ", layers, " names");
  for (std::size_t layer = 0; layer < layers; ++layer) {
    const Json& type = (*types)[layer];
    require(type == "full_attention" || type == "sliding_attention", config.origin(), ": layer_types[", layer,
            "] is ", io::in_quotes(type.dump()), ", expected full_attention or sliding_attention");
    if (type == "sliding_attention") windows[layer] = window;
  }
  return windows;
}

/// Quantised weights may be stored beside plain ones, or weights may be quantised when they are
/// loaded. In both cases transformers computes something other than the plain weights give.
void refuse_quantised(const Fields& config) {
  const std::optional<Fields> quantised = config.object("quantization_config");
  if (!quantised) return;
  throw ConfigError(message(config.origin(), ": quantization_config asks for weights quantised by ",
                            io::in_quotes(quantised->text("quant_method", "an unnamed method")),
                            ", which this model does not compute: use the unquantised checkpoint"));
}

std::vector<int> eos_tokens_of(const Fields& config, std::size_t vocabulary) {
  const Json* value = config.find("eos_token_id");
  if (!value) return {};
  std::vector<int> tokens;
  const Json list = value->is_array() ? *value : Json::array({*value});
  for (const Json& token : list) {
    require(token.is_number_unsigned() && token.get<std::uint64_t>() < vocabulary, config.origin(),
            ": eos_token_id holds ", io::in_quotes(token.dump()), ", expected tokens below ", vocabulary);
    tokens.push_back(token.get<int>());
  }
  return tokens;
}

}  // namespace

void LlamaConfig::validate() const {
  const auto size = [](const char* name, std::size_t value, std::size_t most) {
    require(value > 0 && value <= most, "LlamaConfig: ", name, " is ", value, ", must be 1 to ", most);
  };
  size("vocabulary", vocabulary, largest_size);
  size("hidden", hidden, largest_size);
  size("intermediate", intermediate, largest_size);
  size("layers", layers, most_layers);
  size("q_heads", q_heads, 65536);
  size("kv_heads", kv_heads, 65536);
  size("head_dim", head_dim, 65536);
  require(q_heads % kv_heads == 0, "LlamaConfig: q_heads is ", q_heads,
          ", must be a multiple of kv_heads = ", kv_heads);
  require(head_dim % 2 == 0, "LlamaConfig: head_dim is ", head_dim,
          ", must be even, because channels are rotated in pairs");
  require(norm_eps > 0 && std::isfinite(norm_eps), "LlamaConfig: norm_eps is ", norm_eps,
          ", must be positive");
  require(windows.size() == layers, "LlamaConfig: has ", windows.size(), " windows for ", layers, " layers");
  rotary.validate();
}

LlamaConfig parse_llama_config(std::string_view text, std::string_view origin) {
  const Json json = io::parse_json(text, origin);
  require<FormatError>(json.is_object(), origin, ": not a JSON object");
  const Fields fields{json, origin};
  const Family family = family_of(fields);
  refuse_quantised(fields);
  const std::string activation = fields.text("hidden_act", "silu");
  require(activation == "silu", origin, ": hidden_act ", io::in_quotes(activation),
          " is not supported, expected silu");

  LlamaConfig config;
  config.vocabulary = fields.size("vocab_size");
  config.hidden = fields.size("hidden_size");
  config.intermediate = fields.size("intermediate_size");
  config.layers = fields.size("num_hidden_layers");
  config.q_heads = fields.size("num_attention_heads");
  config.kv_heads = fields.size("num_key_value_heads", config.q_heads);
  require(config.layers <= LlamaConfig::most_layers, origin, ": num_hidden_layers is ", config.layers,
          ", expected 1 to ", LlamaConfig::most_layers);
  require(config.q_heads > 0, origin, ": num_attention_heads is 0, expected at least 1");
  const bool own_head_dim = fields.find("head_dim") || family == Family::qwen3;
  require(own_head_dim || config.hidden % config.q_heads == 0, origin,
          ": head_dim is missing and num_attention_heads = ", config.q_heads,
          " does not divide hidden_size = ", config.hidden);
  // 128 is the default of transformers' Qwen3Config.
  config.head_dim = fields.size("head_dim", family == Family::qwen3 ? 128 : config.hidden / config.q_heads);
  config.max_positions = fields.size("max_position_embeddings", 0);
  config.norm_eps = static_cast<float>(fields.number("rms_norm_eps", 1e-6));
  config.rotary = rotary_of(fields);
  config.tied_embeddings = fields.flag("tie_word_embeddings", false);
  config.qkv_bias = family == Family::qwen2;
  if (family == Family::llama || family == Family::qwen3) {
    config.qkv_bias = config.o_bias = fields.flag("attention_bias", false);
  }
  if (family == Family::llama) config.mlp_bias = fields.flag("mlp_bias", false);
  config.qk_norm = family == Family::qwen3;
  config.windows = windows_of(fields, family, config.layers);
  config.eos_tokens = eos_tokens_of(fields, config.vocabulary);
  try {
    config.validate();
  } catch (const ConfigError& error) {
    throw ConfigError(message(origin, ": ", error.what()));
  }
  return config;
}

LlamaConfig load_llama_config(const std::string& path) {
  if (is_gguf(path)) return gguf_llama_config(GgufFile{path});
  const std::string file = path + "/config.json";
  return parse_llama_config(io::read_text_file(file, max_config_bytes), file);
}

}  // namespace kvpolicy::reference
