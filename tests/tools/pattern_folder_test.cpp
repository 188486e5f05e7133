// SPDX-License-Identifier: Apache-2.0
#include <common/model_sizes.hpp>
#include <common/pattern_folder.hpp>

#include <filesystem>
#include <fstream>
#include <string>

#include <unistd.h>

#include <doctest/doctest.h>

#include <kvpolicy/core/error.hpp>

using namespace kvpolicy;
using namespace kvpolicy::tools;
namespace fs = std::filesystem;

namespace {

// A folder that is deleted afterwards.
class Folder {
 public:
  Folder() { fs::create_directories(path); }
  ~Folder() { fs::remove_all(path); }
  Folder(const Folder&) = delete;
  Folder& operator=(const Folder&) = delete;

  void write(const std::string& name, const std::string& text) const {
    fs::create_directories((path / name).parent_path());
    std::ofstream{path / name} << text;
  }

  fs::path path = fs::temp_directory_path() / ("kvpolicy_patterns_" + std::to_string(::getpid()));
};

}  // namespace

TEST_CASE("a pattern may be one folder below, like the published ones, or be named by its file") {
  const Folder folder;
  const std::string run = "Llama/lr=0.02-ctx=1000_32000";
  folder.write(run + "/full_attention_heads.tsv", "1\t0\n");
  CHECK(pattern_folder(folder.path / "Llama") == folder.path / run);
  CHECK(pattern_folder(folder.path / run) == folder.path / run);
  CHECK(pattern_folder(folder.path / run / "full_attention_heads.tsv") == folder.path / run);
  CHECK_FALSE(is_pattern_path(folder.path / run / "scores.json"));
  CHECK(is_pattern_path(folder.path / "Llama"));
  // A folder without a pattern, or with one two levels below, is returned for the reader to refuse; two
  // patterns are ambiguous.
  CHECK(pattern_folder(folder.path) == folder.path);
  folder.write("Llama/another/full_attention_heads.tsv", "1\t0\n");
  CHECK_THROWS_WITH_AS(static_cast<void>(pattern_folder(folder.path / "Llama")),
                       doctest::Contains("holds 2 patterns"), FormatError);
  folder.write("gates.tsv", "1\t0\n");
  CHECK_THROWS_WITH_AS(static_cast<void>(pattern_folder(folder.path / "gates.tsv")),
                       doctest::Contains("gates.tsv: the gates of a pattern are called"), FormatError);
}

TEST_CASE("a model's shape is read from any config that has it") {
  const Folder folder;
  const auto shape = [&](const std::string& config) {
    folder.write("config.json", config);
    return parse_shape(folder.path.string());
  };
  // Two configs that the reference model refuses: one with yarn, and one with its own architecture.
  CHECK(shape(
            R"({"architectures": ["LlamaForCausalLM"], "hidden_size": 4096, "num_attention_heads": 32,
                  "num_hidden_layers": 32, "num_key_value_heads": 8,
                  "rope_scaling": {"type": "yarn", "factor": 4.0}})") == ModelShape{32, 32, 8, 128});
  CHECK(shape(
            R"({"architectures": ["Qwen3ForCausalLM"], "hidden_size": 2560, "num_attention_heads": 32,
                  "num_hidden_layers": 36, "num_key_value_heads": 8, "head_dim": 128})") ==
        ModelShape{36, 32, 8, 128});
  CHECK(shape(R"({"num_hidden_layers": 32, "num_attention_heads": 32, "hidden_size": 4096,
                  "head_dim": null})") == ModelShape{32, 32, 32, 128});
  CHECK(shape(R"({"text_config": {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 64}})") ==
        ModelShape{2, 4, 4, 64});
  const auto refused = [&](const std::string& config, const std::string& why) {
    CAPTURE(config);
    CHECK_THROWS_WITH_AS(static_cast<void>(shape(config)), doctest::Contains(why.c_str()), Error);
  };
  refused(R"({"num_attention_heads": 32})", "config.json: num_hidden_layers is missing");
  refused(R"({"num_hidden_layers": 2, "num_attention_heads": 0, "hidden_size": 64})",
          "num_attention_heads is 0");
  refused(R"({"num_hidden_layers": 2, "num_attention_heads": 4, "hidden_size": 100})",
          "config.json: head_dim is 25");
  refused(R"([1])", "must be an object");
}
