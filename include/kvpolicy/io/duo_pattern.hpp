// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes the attention patterns published with DuoAttention (arXiv:2410.10819). A pattern is a
// folder with two files: `full_attention_heads.tsv` has a line of tab-separated gates for each layer, one
// for each KV head; of `config.json` only `sink_size` and `recent_size` are used.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <string>
#include <string_view>
#include <system_error>
#include <tuple>
#include <utility>
#include <vector>

#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <kvpolicy/plan/duo_gates.hpp>

namespace kvpolicy::io {

/// The contents of a DuoAttention folder: the gates, and what streaming heads kept in training.
struct DuoPattern {
  HeadGates gates;           ///< [layers, kv_heads], as in the file
  std::size_t sinks = 128;   ///< `sink_size`
  std::size_t recent = 256;  ///< `recent_size`
  friend bool operator==(const DuoPattern&, const DuoPattern&) = default;
};

/// The name of a folder's file of gates.
inline constexpr const char* duo_gates_file = "full_attention_heads.tsv";
/// The name of a folder's file of settings.
inline constexpr const char* duo_config_file = "config.json";

/// Reads one number of a text file; spaces around it are allowed.
/// @throws FormatError, which begins with `where`, if it is not a finite number.
[[nodiscard]] inline double parse_number(std::string_view field, std::string_view where) {
  const auto trim = [](std::string_view text) {
    const std::size_t first = text.find_first_not_of(" \r");
    return first == std::string_view::npos ? std::string_view{}
                                           : text.substr(first, text.find_last_not_of(" \r") - first + 1);
  };
  std::string_view digits = trim(field);
  require<FormatError>(!digits.empty(), where, ": is empty, must be a number");
  if (digits.size() > 1 && digits.front() == '+' && digits[1] != '-') digits.remove_prefix(1);
  double number = 0.0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), number);
  require<FormatError>(error != std::errc::result_out_of_range, where, ": ", in_quotes(field),
                       " is beyond the range of a double");
  require<FormatError>(error == std::errc{} && end == digits.data() + digits.size(), where, ": ",
                       in_quotes(field), " is not a number");
  require<FormatError>(std::isfinite(number), where, ": ", in_quotes(field), ", must be finite");
  return number;
}

/// Reads the gates of a `full_attention_heads.tsv`. Empty lines and lines that begin with # are skipped.
/// @throws FormatError for a row of another length than the first, or a field that is not a number.
[[nodiscard]] inline HeadGates parse_duo_gates(std::string_view text,
                                               std::string_view origin = duo_gates_file) {
  std::vector<double> gates;
  std::size_t layers = 0;
  std::size_t heads = 0;
  std::size_t line_number = 0;
  while (!text.empty()) {
    const std::size_t newline = text.find('\n');
    std::string_view line = text.substr(0, newline);
    text.remove_prefix(newline == std::string_view::npos ? text.size() : newline + 1);
    ++line_number;
    if (line.find_first_not_of(" \t\r") == std::string_view::npos || line.front() == '#') continue;
    std::size_t fields = 0;
    for (bool more = true; more; ++fields) {
      const std::size_t tab = line.find('\t');
      more = tab != std::string_view::npos;
      gates.push_back(
          parse_number(line.substr(0, tab), message(origin, ": line ", line_number, ", field ", fields + 1)));
      line.remove_prefix(more ? tab + 1 : line.size());
    }
    if (layers == 0) heads = fields;
    require<FormatError>(fields == heads, origin, ": line ", line_number, " has ", fields,
                         " numbers, the lines before have ", heads, ": one for each KV head");
    ++layers;
  }
  require<FormatError>(layers > 0, origin, ": has no numbers, must have a line of gates for each layer");
  return {layers, heads, std::move(gates)};
}

/// Reads `sink_size` and `recent_size` of a `config.json`; its other keys only document the training.
/// @throws FormatError if one is missing or not a whole number, or recent_size is 0.
[[nodiscard]] inline std::pair<std::size_t, std::size_t> parse_duo_config(
    std::string_view text, std::string_view origin = duo_config_file) {
  const Json json = parse_json(text, origin);
  JsonObject object{json, std::string{origin}};
  constexpr std::size_t most = std::size_t{1} << 30;
  const std::size_t sinks = object.count("sink_size", most);
  const std::size_t recent = object.count("recent_size", most);
  require<FormatError>(recent > 0, origin, ", recent_size: is 0, must be at least 1");
  return {sinks, recent};
}

/// Reads both files of a folder. `path` is the folder, or the .tsv file in it under any name.
/// @throws FormatError
[[nodiscard]] inline DuoPattern load_duo_pattern(const std::filesystem::path& path) {
  std::error_code error;
  const bool is_folder = std::filesystem::is_directory(path, error);
  require<FormatError>(is_folder || path.extension() == ".tsv", path.string(), ": is not a folder",
                       error ? " (" + error.message() + ")" : "", "; a DuoAttention pattern is one, with ",
                       duo_gates_file, " and ", duo_config_file);
  const auto gates = is_folder ? path / duo_gates_file : path;
  const auto config = gates.parent_path() / duo_config_file;
  DuoPattern pattern;
  pattern.gates = parse_duo_gates(read_text_file(gates), gates.string());
  std::tie(pattern.sinks, pattern.recent) = parse_duo_config(read_text_file(config), config.string());
  return pattern;
}

/// Writes the text of a `full_attention_heads.tsv`, with the fewest digits that read back as the same
/// numbers.
[[nodiscard]] inline std::string format_duo_gates(const HeadGates& gates) {
  check_gates(gates);
  std::string text;
  for (std::size_t layer = 0; layer < gates.layers(); ++layer) {
    for (std::size_t head = 0; head < gates.heads(); ++head) {
      char digits[32];
      const auto end = std::to_chars(digits, digits + sizeof digits, gates(layer, head)).ptr;
      if (head > 0) text += '\t';
      text.append(digits, end);
    }
    text += '\n';
  }
  return text;
}

/// Writes both files; makes the folder if there is none.
/// @throws ConfigError for a gate that is not finite, StorageError if a file cannot be written or the
/// folder cannot be made.
inline void save_duo_pattern(const std::filesystem::path& folder, const DuoPattern& pattern) {
  const std::string gates = format_duo_gates(pattern.gates);
  std::error_code error;
  std::filesystem::create_directories(folder, error);
  require<StorageError>(!error, folder.string(), ": cannot be made: ", error.message());
  write_text_file(folder / duo_gates_file, gates);
  const Json config = {{"sink_size", pattern.sinks}, {"recent_size", pattern.recent}};
  write_text_file(folder / duo_config_file, config.dump() + "\n");
}

}  // namespace kvpolicy::io
