// SPDX-License-Identifier: Apache-2.0
//
// What the subcommands of identify_heads do with gates that they found in one go.
#pragma once

#include <cstddef>
#include <filesystem>
#include <string>
#include <utility>
#include <vector>

#include <fmt/format.h>

#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/io/json_text.hpp>

#include <common/files.hpp>
#include <common/json_line.hpp>

namespace kvpolicy::tools {

/// The last part of a model's path: "smollm2".
[[nodiscard]] inline std::string model_name(const std::string& path) {
  std::filesystem::path model{path};
  if (!model.has_filename()) model = model.parent_path();  // the path was "folder/"
  return model.filename().string();
}

/// Writes a pattern in DuoAttention's format, whose config.json also has `settings`.
inline void save_gates(const std::filesystem::path& folder, const HeadGates& gates, std::size_t sinks,
                       std::size_t recent, const io::Json& settings) {
  io::save_duo_pattern(folder, {.gates = gates, .sinks = sinks, .recent = recent});
  io::Json config = {{"sink_size", sinks}, {"recent_size", recent}};
  config.update(settings);
  io::write_text_file(folder / io::duo_config_file, as_line(config, 2) + "\n");
}

/// Prints settings and gates as a line of JSON.
inline void print_gates(io::Json settings, const HeadGates& gates) {
  for (std::size_t layer = 0; layer < gates.layers(); ++layer) {
    const auto row = gates.layer(layer);
    settings["gates"].push_back(std::vector<double>(row.begin(), row.end()));
  }
  fmt::print("{}\n", as_line(std::move(settings)));
}

}  // namespace kvpolicy::tools
