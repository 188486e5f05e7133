// SPDX-License-Identifier: Apache-2.0
//
// Looks into a model without loading its weights: a Hugging Face folder or a GGUF file.
#include <algorithm>
#include <cstddef>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include <fmt/format.h>
#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/io/json_text.hpp>
#include <reference_model/config.hpp>
#include <reference_model/gguf.hpp>
#include <reference_model/safetensors.hpp>

#include "common/files.hpp"
#include "common/json_line.hpp"
#include "common/run_tool.hpp"
#include "common/table.hpp"

namespace kvpolicy::tools {
namespace {

constexpr const char* description =
    R"(Says what a model is and how its weights are stored, from headers alone: a Hugging Face folder
with safetensors, or a GGUF file. A model that these tools cannot run is described too, with the reason.)";

constexpr const char* examples = R"(Examples:
  # the shipped model: its shape, and how many bytes its weights take
  model_info reference_model/weights/keyfinder
  # what a GGUF file says besides, its tokenizer included
  model_info tests/model/goldens_gguf/quantised.gguf --metadata
  # every tensor, for another program
  model_info tests/model/goldens_gguf/quantised.gguf --tensors --json)";

struct Arguments {
  std::string model;
  bool tensors = false;
  bool metadata = false;
  bool json = false;
};

struct Tensor {
  std::string name, type;
  std::vector<std::size_t> shape;
  std::size_t bytes = 0;
};

struct Contents {
  std::vector<Tensor> tensors;
  std::map<std::string, std::string> metadata;
};

Contents contents_of(const std::string& path) {
  Contents contents;
  if (reference::is_gguf(path)) {
    const reference::GgufFile file{path};
    for (const auto& [name, tensor] : file.header().tensors) {
      contents.tensors.push_back(
          {name, std::string{reference::block_of(tensor.type).name}, tensor.shape, tensor.bytes});
    }
    for (const auto& [key, value] : file.header().metadata) contents.metadata[key] = reference::shown(value);
    return contents;
  }
  std::vector<std::string> files;
  for (const auto& entry : std::filesystem::directory_iterator(path)) {
    // Mistral's folders also hold the same weights once more, as consolidated.safetensors.
    const std::string name = entry.path().filename().string();
    if (name.starts_with("model") && name.ends_with(".safetensors")) files.push_back(entry.path().string());
  }
  std::ranges::sort(files);
  for (const std::string& name : files) {
    const reference::SafetensorsFile file{name};
    for (const auto& [tensor, entry] : file.header().tensors) {
      contents.tensors.push_back({tensor, std::string{reference::name_of(entry.type)}, entry.shape,
                                  static_cast<std::size_t>(entry.end - entry.begin)});
    }
    for (const auto& [key, value] : file.header().metadata) contents.metadata[key] = io::in_quotes(value);
  }
  return contents;
}

std::string words_for(const reference::LlamaConfig& c) {
  constexpr const char* scalings[]{"", ", linear scaling", ", Llama 3's scaling"};
  std::string text = fmt::format(
      "{} layers, {} query heads, {} KV heads of {}; hidden {}, MLP {}, vocabulary {}, context {}\n"
      "rotary theta {:g}{}",
      c.layers, c.q_heads, c.kv_heads, c.head_dim, c.hidden, c.intermediate, thousands(c.vocabulary),
      thousands(c.max_positions), c.rotary.theta, scalings[static_cast<std::size_t>(c.rotary.scaling)]);
  const auto windows = std::ranges::count_if(c.windows, [](std::size_t window) { return window > 0; });
  if (windows > 0) {
    text += fmt::format("; {} layers with a window of {}", windows, std::ranges::max(c.windows));
  }
  if (c.qkv_bias) text += "; biases";
  if (c.qk_norm) text += "; norms of queries and keys";
  if (c.tied_embeddings) text += "; tied embeddings";
  const std::size_t row = 2 * c.layers * c.kv_heads * c.head_dim * sizeof(bfloat16);
  return text + fmt::format("\na token's keys and values: {} bytes as bfloat16\n", thousands(row));
}

struct Sum {
  std::size_t tensors = 0;
  std::size_t bytes = 0;
};

void print_text(const Arguments& a, const Contents& contents, const std::map<std::string, Sum>& types,
                const std::string& words) {
  Table table;
  table.add_column("type", "", Align::left);
  table.add_column("tensors");
  table.add_column("bytes");
  for (const auto& [type, sum] : types) {
    table.add_row({type, thousands(sum.tensors), thousands(sum.bytes)});
  }
  fmt::print("{}\n{}", words, table.text());
  if (a.metadata) {
    fmt::print("\n");
    for (const auto& [key, value] : contents.metadata) {
      fmt::print("{} = {}\n", io::shortened(key, 80), value);
    }
  }
  if (a.tensors) {
    fmt::print("\n");
    for (const Tensor& tensor : contents.tensors) {
      fmt::print("{} {} {}\n", io::shortened(tensor.name, 80), tensor.type, reference::text_of(tensor.shape));
    }
  }
}

void run(const Arguments& a) {
  const std::string path = repository_path(a.model);
  require_model_folder(path);
  const Contents contents = contents_of(path);
  std::map<std::string, Sum> types;
  for (const Tensor& tensor : contents.tensors) {
    for (const std::string& type : {tensor.type, std::string{"all"}}) {
      types[type].tensors += 1;
      types[type].bytes += tensor.bytes;
    }
  }
  nlohmann::ordered_json result{{"model", a.model}};
  std::string words;
  try {
    const reference::LlamaConfig c = reference::load_llama_config(path);
    words = words_for(c);
    result["shape"] = {{"layers", c.layers},         {"q_heads", c.q_heads},
                       {"kv_heads", c.kv_heads},     {"head_dim", c.head_dim},
                       {"hidden", c.hidden},         {"intermediate", c.intermediate},
                       {"vocabulary", c.vocabulary}, {"max_positions", c.max_positions}};
  } catch (const Error& error) {
    words = message("cannot be run here: ", error.what(), "\n");
    result["cannot_run"] = error.what();
  }
  if (!a.json) return print_text(a, contents, types, words);

  for (const auto& [type, sum] : types) {
    result["types"][type] = {{"tensors", sum.tensors}, {"bytes", sum.bytes}};
  }
  if (a.metadata) result["metadata"] = contents.metadata;
  if (a.tensors) {
    nlohmann::ordered_json& tensors = result["tensors"] = nlohmann::ordered_json::array();
    for (const Tensor& tensor : contents.tensors) {
      tensors.push_back(
          {{"name", tensor.name}, {"type", tensor.type}, {"shape", tensor.shape}, {"bytes", tensor.bytes}});
    }
  }
  fmt::print("{}\n", as_line(result));
}

}  // namespace
}  // namespace kvpolicy::tools

int main(int argc, char** argv) {
  using namespace kvpolicy::tools;
  Arguments arguments;
  CLI::App app{description, "model_info"};
  app.footer(examples);
  app.add_option("model", arguments.model, "A Hugging Face folder or a GGUF file")
      ->required()
      ->type_name("PATH");
  app.add_flag("--tensors", arguments.tensors, "List the tensors: name, type, shape");
  app.add_flag("--metadata", arguments.metadata, "List what the file says besides (GGUF: all its keys)");
  app.add_flag("--json", arguments.json, "Print JSON");
  return run_tool(app, argc, argv, [&] { run(arguments); });
}
