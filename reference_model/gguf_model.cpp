// SPDX-License-Identifier: Apache-2.0
#include <reference_model/gguf_model.hpp>

#include <algorithm>
#include <array>
#include <cmath>
#include <memory>
#include <utility>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/safetensors.hpp>

namespace kvpolicy::reference {
namespace {

// Divisors of the rotary frequencies: how a file says what config.json calls rope_type llama3.
constexpr const char* rotary_divisors = "rope_freqs.weight";

// All settings of an architecture that are understood. Any other asks for something that would be
// left out of the computation.
constexpr std::array<std::string_view, 21> known_settings{"attention.causal",
                                                          "attention.head_count",
                                                          "attention.head_count_kv",
                                                          "attention.key_length",
                                                          "attention.layer_norm_rms_epsilon",
                                                          "attention.sliding_window",
                                                          "attention.value_length",
                                                          "block_count",
                                                          "context_length",
                                                          "embedding_length",
                                                          "expert_count",
                                                          "expert_used_count",
                                                          "feed_forward_length",
                                                          "rope.dimension_count",
                                                          "rope.freq_base",
                                                          "rope.scaling.factor",
                                                          "rope.scaling.finetuned",
                                                          "rope.scaling.original_context_length",
                                                          "rope.scaling.type",
                                                          "tensor_data_layout",
                                                          "vocab_size"};

const GgufTensor* find_tensor(const GgufFile& file, std::string_view name) {
  const auto found = file.header().tensors.find(name);
  return found == file.header().tensors.end() ? nullptr : &found->second;
}

std::vector<float> values_of(const GgufFile& file, const GgufTensor& tensor) {
  std::vector<float> values(tensor.bytes / block_of(tensor.type).bytes * block_of(tensor.type).elements);
  decode_gguf(tensor.type, file.bytes_of(tensor), values);
  return values;
}

void refuse_unknown_settings(const GgufFile& file, const std::string& architecture) {
  const std::string prefix = architecture + ".";
  for (const auto& [key, value] : file.header().metadata) {
    if (!key.starts_with(prefix)) continue;
    const std::string_view setting = std::string_view{key}.substr(prefix.size());
    require(std::ranges::binary_search(known_settings, setting), file.path(), ": metadata ",
            io::in_quotes(key), " is a setting that this model does not compute");
  }
}

RotaryConfig rotary_of(const GgufFile& file, const GgufKeys& keys, const std::string& at,
                       std::size_t head_dim) {
  RotaryConfig rotary{.theta = keys.number(at + "rope.freq_base", 10000.0)};
  // As in llama.cpp, where a factor alone means linear.
  const bool has_factor = keys.number(at + "rope.scaling.factor", 1.0) != 1.0;
  const std::string kind = keys.text(at + "rope.scaling.type", has_factor ? "linear" : "none");
  const GgufTensor* divisors = find_tensor(file, rotary_divisors);
  if (kind == "linear" && !divisors) {
    rotary.scaling = RotaryConfig::Scaling::linear;
    rotary.factor = keys.number(at + "rope.scaling.factor");
    return rotary;
  }
  require(kind == "none", file.path(), ": rope.scaling.type ", io::in_quotes(kind),
          divisors ? " together with rope_freqs.weight" : "", " is not supported, expected none or linear");
  if (!divisors) return rotary;

  // Conversion computes the divisors from Llama 3's settings and drops these. All released models have the same ones but
  // for the factor, which is the largest divisor, and the original length, a power of two; whether they are meant is
  // checked.
  const std::vector<float> given = values_of(file, *divisors);
  RotaryConfig scaled = rotary;
  scaled.scaling = RotaryConfig::Scaling::llama3;
  scaled.factor = given.empty() ? 1.0 : static_cast<double>(*std::ranges::max_element(given));
  const std::vector<float> plain = inverse_frequencies(rotary, head_dim);
  const auto is_meant = [&](double original) {
    scaled.original_max_position = original;
    const std::vector<float> expected = inverse_frequencies(scaled, head_dim);
    bool same = given.size() == plain.size();
    for (std::size_t i = 0; same && i < given.size(); ++i) {
      same = std::fabs(plain[i] / given[i] - expected[i]) <= 1e-4F * expected[i];
    }
    return same;
  };
  const std::string original = at + "rope.scaling.original_context_length";
  bool found = is_meant(keys.number(original, RotaryConfig{}.original_max_position));
  for (double length = 1024; !found && !keys.contains(original) && length <= 1 << 20; length *= 2) {
    found = is_meant(length);
  }
  require(
      found, file.path(),
      ": tensor rope_freqs.weight does not hold the divisors of Llama 3's rotary scaling (low_freq_factor 1, "
      "high_freq_factor 4, an original length of ",
      keys.contains(original) ? message(keys.number(original)) : "any power of two from 1,024 to 1,048,576",
      "), others are not supported");
  return scaled;
}

std::vector<int> eos_tokens_of(const GgufKeys& keys, std::size_t vocabulary) {
  std::vector<int> tokens;
  for (const char* name : {"eos", "eot", "eom"}) {
    const std::string key = message("tokenizer.ggml.", name, "_token_id");
    if (!keys.contains(key)) continue;
    const std::size_t token = keys.size(key);
    require<FormatError>(token < vocabulary, keys.origin(), ": metadata ", key, " is ", token,
                         ", expected a token below ", vocabulary);
    if (std::ranges::count(tokens, static_cast<int>(token)) == 0) {
      tokens.push_back(static_cast<int>(token));
    }
  }
  return tokens;
}

struct NamePair {
  std::string_view gguf, checkpoint;
};
constexpr std::array<NamePair, 3> outer_names{
    {{"token_embd", "model.embed_tokens"}, {"output_norm", "model.norm"}, {"output", "lm_head"}}};
constexpr std::array<NamePair, 11> layer_names{{{"attn_norm", "input_layernorm"},
                                                {"attn_q", "self_attn.q_proj"},
                                                {"attn_k", "self_attn.k_proj"},
                                                {"attn_v", "self_attn.v_proj"},
                                                {"attn_output", "self_attn.o_proj"},
                                                {"attn_q_norm", "self_attn.q_norm"},
                                                {"attn_k_norm", "self_attn.k_norm"},
                                                {"ffn_norm", "post_attention_layernorm"},
                                                {"ffn_gate", "mlp.gate_proj"},
                                                {"ffn_up", "mlp.up_proj"},
                                                {"ffn_down", "mlp.down_proj"}}};

/// "blk.3.attn_q.weight" -> "model.layers.3.self_attn.q_proj.weight". A name that is not known
/// stays, and is refused by that name as a tensor that the model does not have.
std::string checkpoint_name(std::string_view name) {
  const std::size_t dot = name.rfind('.');
  if (dot == std::string_view::npos) return std::string{name};
  const std::string_view kind = name.substr(dot);  // ".weight" or ".bias"
  std::string_view stem = name.substr(0, dot);
  for (const NamePair& pair : outer_names) {
    if (stem == pair.gguf) return message(pair.checkpoint, kind);
  }
  constexpr std::string_view block = "blk.";
  const std::size_t end = stem.find('.', block.size());
  if (stem.starts_with(block) && end != std::string_view::npos) {
    const std::string_view layer = stem.substr(block.size(), end - block.size());
    for (const NamePair& pair : layer_names) {
      if (stem.substr(end + 1) == pair.gguf) {
        return message("model.layers.", layer, ".", pair.checkpoint, kind);
      }
    }
  }
  return std::string{name};
}

/// The type of a tensor that is stored as plain numbers.
std::optional<TensorType> plain_type(GgufType type) {
  switch (type) {
    case GgufType::f32: return TensorType::f32;
    case GgufType::f16: return TensorType::f16;
    case GgufType::bf16: return TensorType::bf16;
    default: return std::nullopt;
  }
}

/// The row of the file that holds a head's row `row`. llama.cpp rotates neighbouring channels,
/// Hugging Face's models rotate channel i with channel i + head_dim / 2, so conversion has
/// reordered the rows.
std::size_t row_in_file(std::size_t row, std::size_t head_dim) {
  const std::size_t channel = row % head_dim;
  const std::size_t half = head_dim / 2;
  return row - channel + 2 * (channel % half) + channel / half;
}

}  // namespace

LlamaConfig gguf_llama_config(const GgufFile& file) {
  const GgufKeys keys{file.header(), file.path()};
  const std::string architecture = keys.text("general.architecture");
  require(architecture == "llama" || architecture == "qwen2" || architecture == "qwen3", file.path(),
          ": architecture ", io::in_quotes(architecture),
          " is not supported, expected llama, qwen2 or qwen3");
  const std::string at = architecture + ".";
  refuse_unknown_settings(file, architecture);
  require(keys.size(at + "expert_count", 0) == 0, file.path(), ": has ", keys.size(at + "expert_count", 0),
          " experts in each layer; mixtures of experts are not supported");
  require(keys.flag(at + "attention.causal", true), file.path(),
          ": attention.causal is false, expected a model that reads from left to right");

  LlamaConfig config;
  const GgufTensor* embedding = find_tensor(file, "token_embd.weight");
  require<FormatError>(embedding && embedding->shape.size() == 2, file.path(),
                       ": has no matrix token_embd.weight");
  config.vocabulary = keys.size(at + "vocab_size", embedding->shape[0]);
  config.hidden = keys.size(at + "embedding_length");
  config.intermediate = keys.size(at + "feed_forward_length");
  config.layers = keys.size(at + "block_count");
  config.q_heads = keys.size(at + "attention.head_count");
  config.kv_heads = keys.size(at + "attention.head_count_kv", config.q_heads);
  require(config.layers > 0 && config.layers <= LlamaConfig::most_layers, file.path(), ": block_count is ",
          config.layers, ", expected 1 to ", LlamaConfig::most_layers);
  require(config.q_heads > 0, file.path(), ": attention.head_count is 0, expected at least 1");
  config.head_dim = keys.size(at + "attention.key_length", config.hidden / config.q_heads);
  for (const char* same : {"attention.value_length", "rope.dimension_count"}) {
    const std::size_t size = keys.size(at + same, config.head_dim);
    require(size == config.head_dim, file.path(), ": ", same, " is ", size, ", expected the head_dim ",
            config.head_dim);
  }
  config.max_positions = keys.size(at + "context_length", 0);
  config.norm_eps = static_cast<float>(keys.number(at + "attention.layer_norm_rms_epsilon"));
  config.tied_embeddings = !find_tensor(file, "output.weight");
  config.qkv_bias = find_tensor(file, "blk.0.attn_q.bias") != nullptr;
  config.o_bias = find_tensor(file, "blk.0.attn_output.bias") != nullptr;
  config.mlp_bias = find_tensor(file, "blk.0.ffn_gate.bias") != nullptr;
  config.qk_norm = architecture == "qwen3";
  config.windows.assign(config.layers, keys.size(at + "attention.sliding_window", 0));
  config.eos_tokens = eos_tokens_of(keys, config.vocabulary);
  try {
    config.validate();  // before the frequencies, which need a possible head_dim
    config.rotary = rotary_of(file, keys, at, config.head_dim);
    config.validate();
  } catch (const ConfigError& error) {
    const std::string text = error.what();
    throw ConfigError(text.starts_with(file.path()) ? text : message(file.path(), ": ", text));
  }
  return config;
}

namespace {

// Of `tokenizer.ggml.`: read below, or saying nothing of which tokens a text has. In alphabetical order.
constexpr std::array<std::string_view, 29> known_tokenizer_settings{"add_bos_token",
                                                                    "add_eos_token",
                                                                    "add_space_prefix",
                                                                    "added_tokens",
                                                                    "bos_token_id",
                                                                    "cls_token_id",
                                                                    "eom_token_id",
                                                                    "eos_token_id",
                                                                    "eot_token_id",
                                                                    "fim_mid_token_id",
                                                                    "fim_pad_token_id",
                                                                    "fim_pre_token_id",
                                                                    "fim_rep_token_id",
                                                                    "fim_sep_token_id",
                                                                    "fim_suf_token_id",
                                                                    "mask_token_id",
                                                                    "merges",
                                                                    "middle_token_id",
                                                                    "model",
                                                                    "padding_token_id",
                                                                    "pre",
                                                                    "prefix_token_id",
                                                                    "scores",
                                                                    "seperator_token_id",
                                                                    "suffix_token_id",
                                                                    "token_type",
                                                                    "token_type_count",
                                                                    "tokens",
                                                                    "unknown_token_id"};

// Those that change tokens when they are true.
constexpr std::array<std::string_view, 2> tokenizer_settings_to_be_false{"add_sep_token",
                                                                         "remove_extra_whitespaces"};

void refuse_unknown_tokenizer_settings(const GgufFile& file, const GgufKeys& keys, std::string_view at) {
  for (const auto& [key, value] : file.header().metadata) {
    if (!key.starts_with(at)) continue;
    const std::string_view setting = std::string_view{key}.substr(at.size());
    if (std::ranges::binary_search(known_tokenizer_settings, setting)) continue;
    const bool is_off =
        std::ranges::find(tokenizer_settings_to_be_false, setting) != tokenizer_settings_to_be_false.end() &&
        !keys.flag(key);
    require<FormatError>(is_off, file.path(), ": metadata ", io::in_quotes(key),
                         " is a setting of a tokenizer that is not implemented");
  }
}

}  // namespace

GgufTokenizer gguf_tokenizer(const GgufFile& file) {
  const GgufKeys keys{file.header(), file.path()};
  const std::string at = "tokenizer.ggml.";
  refuse_unknown_tokenizer_settings(file, keys, at);
  const auto token = [&](const char* name) {
    const std::string key = message(at, name, "_token_id");
    return keys.contains(key) ? std::optional{keys.size(key)} : std::nullopt;
  };
  const auto flag = [&](const char* name) {
    const std::string key = at + name;
    return keys.contains(key) ? std::optional{keys.flag(key)} : std::nullopt;
  };
  GgufTokenizer tokenizer{.model = keys.text(at + "model"),
                          .pre = keys.text(at + "pre", ""),
                          .tokens = keys.texts(at + "tokens"),
                          .merges = keys.texts(at + "merges"),
                          .scores = keys.numbers(at + "scores"),
                          .token_types = keys.whole_numbers(at + "token_type"),
                          .bos = token("bos"),
                          .eos = token("eos"),
                          .unknown = token("unknown"),
                          .add_bos = flag("add_bos_token"),
                          .add_eos = flag("add_eos_token"),
                          .add_space_prefix = flag("add_space_prefix"),
                          .chat_template = keys.text("tokenizer.chat_template", "")};
  require<FormatError>(!tokenizer.tokens.empty(), file.path(), ": metadata tokenizer.ggml.tokens is missing");
  return tokenizer;
}

GgufWeights::GgufWeights(const std::string& path)
    : file_{std::make_shared<const GgufFile>(path)}, config_{gguf_llama_config(*file_)} {
  for (const auto& [name, tensor] : file_->header().tensors) {
    if (name == rotary_divisors) continue;
    const auto [named, is_new] = names_.emplace(checkpoint_name(name), &tensor);
    require<FormatError>(is_new, path, ": two tensors for ", io::in_quotes(named->first), ", one is ",
                         io::in_quotes(name));
  }
}

std::vector<std::string> GgufWeights::names() const {
  std::vector<std::string> names;
  for (const auto& [name, tensor] : names_) names.push_back(name);
  return names;
}

const GgufTensor& GgufWeights::tensor(std::string_view name) const {
  const auto found = names_.find(name);
  require<FormatError>(found != names_.end(), file_->path(), ": has no tensor for ", io::in_quotes(name));
  return *found->second;
}

bool GgufWeights::reordered(std::string_view name) const {
  const bool rotated = name.find("self_attn.q_proj.") != std::string_view::npos ||
                       name.find("self_attn.k_proj.") != std::string_view::npos;
  return rotated && GgufKeys{file_->header(), file_->path()}.text("general.architecture") == "llama";
}

void GgufWeights::check(std::string_view name, std::span<const std::size_t> shape) const {
  require<FormatError>(contains(name), file_->path(), ": has no tensor for ", io::in_quotes(name),
                       " of shape ", text_of(shape));
  const std::vector<std::size_t>& own = tensor(name).shape;
  require<FormatError>(std::ranges::equal(own, shape), file_->path(), ": tensor for ", io::in_quotes(name),
                       ": shape is ", text_of(own), ", the metadata needs ", text_of(shape));
}

std::vector<float> GgufWeights::read(std::string_view name, std::span<const std::size_t> shape) const {
  check(name, shape);
  std::vector<float> values = values_of(*file_, tensor(name));
  const auto odd = std::ranges::find_if_not(values, is_finite) - values.begin();
  require_finite(name, static_cast<std::size_t>(odd), values.size());
  if (!reordered(name)) return values;
  const std::size_t columns = shape.size() == 2 ? shape[1] : 1;  // a bias has one number in each row
  std::vector<float> ordered(values.size());
  for (std::size_t row = 0; row < shape[0]; ++row) {
    const std::size_t from = row_in_file(row, config_.head_dim);
    std::copy_n(values.data() + from * columns, columns, ordered.data() + row * columns);
  }
  return ordered;
}

WeightFormat GgufWeights::format(std::string_view name) const {
  switch (tensor(name).type) {
    case GgufType::f32: return WeightFormat::float32;
    case GgufType::f16: return WeightFormat::float16;
    default: return WeightFormat::bfloat16;  // also of quantised blocks, as the smallest that is fast
  }
}

WeightMatrix GgufWeights::matrix(std::string_view name, std::size_t rows, std::size_t columns,
                                 std::optional<WeightFormat> wanted) const {
  const std::array shape{rows, columns};
  const GgufTensor& own = tensor(name);
  const WeightFormat target = wanted.value_or(format(name));
  const auto type = plain_type(own.type);
  if (type && target == format(name) && !reordered(name)) {
    check(name, shape);
    const auto bytes = file_->bytes_of(own);
    require_finite(name, first_not_finite(*type, bytes).value_or(rows * columns), rows * columns);
    return {rows, columns, target, bytes, file_};
  }
  WeightMatrix converted{rows, columns, read(name, shape), target};
  file_->release(own);
  return converted;
}

void GgufWeights::require_finite(std::string_view name, std::size_t first_odd, std::size_t elements) const {
  require<FormatError>(first_odd == elements, file_->path(), ": tensor for ", io::in_quotes(name),
                       ": element ", first_odd, " is NaN or infinite, expected finite values");
}

}  // namespace kvpolicy::reference
