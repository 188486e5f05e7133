// SPDX-License-Identifier: Apache-2.0
//
// Reads and writes the head scores published with HeadKV (arXiv:2410.19258): a JSON object that gives each
// query head, "layer-head", a list of scores, one for each sample. A head's score is their mean. The
// published code takes heads in the order of the file; here the key decides, so the order does not matter.
#pragma once

#include <charconv>
#include <cmath>
#include <cstddef>
#include <filesystem>
#include <limits>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/io/json_text.hpp>
#include <kvpolicy/io/text_file.hpp>
#include <kvpolicy/plan/headkv_budgets.hpp>

namespace kvpolicy::io {

/// Reads the two numbers of a key such as "31-7".
/// @throws FormatError for anything else, a number with a leading zero included.
[[nodiscard]] inline std::pair<std::size_t, std::size_t> parse_head_key(std::string_view key,
                                                                        std::string_view origin) {
  constexpr std::size_t most = (std::size_t{1} << 20) - 1;
  const auto number = [&](std::string_view digits) {
    std::size_t value = 0;
    const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), value);
    const bool canonical = digits == "0" || (!digits.empty() && digits.front() != '0');
    require<FormatError>(
        error == std::errc{} && end == digits.data() + digits.size() && canonical && value <= most, origin,
        ": the key ", in_quotes(key), " must name a head as layer-head, like '0-0' or '31-7'");
    return value;
  };
  const std::size_t dash = std::min(key.find('-'), key.size());
  const std::size_t layer = number(key.substr(0, dash));
  return {layer, number(key.substr(std::min(dash + 1, key.size())))};
}

/// The score of every sample for each query head [layers, q_heads].
using HeadSamples = HeadTable<std::vector<double>>;

/// Reads the text of a score file, with every sample.
/// @throws FormatError if a head is missing, has no scores, or has a score that is not a number.
[[nodiscard]] inline HeadSamples parse_head_samples(std::string_view text,
                                                    std::string_view origin = "head scores") {
  const Json json = parse_json(text, origin);
  require<FormatError>(json.is_object() && !json.empty(), origin, ": must be an object that gives ",
                       "each head, 'layer-head', a list of scores, is ", shown(json));
  std::size_t layers = 0;
  std::size_t heads = 0;
  for (const auto& item : json.items()) {
    const auto [layer, head] = parse_head_key(item.key(), origin);
    layers = std::max(layers, layer + 1);
    heads = std::max(heads, head + 1);
  }
  // Keys are distinct and can be written in one way only, so the count tells whether one is missing.
  require<FormatError>(json.size() == layers * heads, origin, ": has ", json.size(),
                       " heads, but the largest numbers mean ", layers, " layers x ", heads, " heads");
  HeadSamples samples{layers, heads};
  for (const auto& item : json.items()) {
    const auto [layer, head] = parse_head_key(item.key(), origin);
    const Json& list = item.value();
    require<FormatError>(list.is_array() && !list.empty(), origin, ", key '", item.key(),
                         "': must be a list of at least one score, is ", shown(list));
    for (const Json& score : list) {
      if (!score.is_number()) {  // builds the message only for a wrong score
        fail<FormatError>(origin, ", key '", item.key(), "': every score must be a number, one is ",
                          shown(score));
      }
      samples(layer, head).push_back(score.get<double>());
    }
  }
  return samples;
}

/// Reads the mean of each head's samples. @throws FormatError like `parse_head_samples`, or if a sum is not
/// finite.
[[nodiscard]] inline HeadScores parse_head_scores(std::string_view text,
                                                  std::string_view origin = "head scores") {
  const HeadSamples samples = parse_head_samples(text, origin);
  HeadScores scores{samples.layers(), samples.heads()};
  for (std::size_t layer = 0; layer < samples.layers(); ++layer) {
    for (std::size_t head = 0; head < samples.heads(); ++head) {
      double sum = 0.0;
      for (const double score : samples(layer, head)) sum += score;
      const double mean = sum / static_cast<double>(samples(layer, head).size());
      require<FormatError>(std::isfinite(mean), origin, ", key '", layer, '-', head,
                           "': the scores sum to more than a double holds");
      scores(layer, head) = mean;
    }
  }
  return scores;
}

/// Reads a score file: the mean of each head.
/// @throws FormatError
[[nodiscard]] inline HeadScores load_head_scores(const std::filesystem::path& path) {
  return parse_head_scores(read_text_file(path), path.string());
}

/// Writes the text of a score file, in one line, as the published code reads it.
/// @throws ConfigError for a head without samples, or a score that is not finite.
[[nodiscard]] inline std::string format_head_samples(const HeadSamples& samples) {
  std::string text = "{";
  for (std::size_t layer = 0; layer < samples.layers(); ++layer) {
    for (std::size_t head = 0; head < samples.heads(); ++head) {
      require(!samples(layer, head).empty(), "HeadSamples: layer ", layer, ", head ", head,
              " has no samples, must have at least 1");
      text += message(text.size() > 1 ? ", " : "", '"', layer, '-', head, "\": [");
      for (std::size_t i = 0; i < samples(layer, head).size(); ++i) {
        const double score = samples(layer, head)[i];
        require(std::isfinite(score), "HeadScores: the score of layer ", layer, ", head ", head, " is ",
                score, ", must be finite");
        text += (i > 0 ? ", " : "") + Json(score).dump();
      }
      text += "]";
    }
  }
  return text + "}\n";
}

/// Writes the text of a score file with one score for each head.
[[nodiscard]] inline std::string format_head_scores(const HeadScores& scores) {
  HeadSamples samples{scores.layers(), scores.heads()};
  for (std::size_t i = 0; i < scores.values().size(); ++i) {
    samples.values()[i] = {scores.values()[i]};
  }
  return format_head_samples(samples);
}

/// Writes a score file with one sample for each head.
/// @throws ConfigError for a score that is not finite, StorageError if the file cannot be
/// written.
inline void save_head_scores(const std::filesystem::path& path, const HeadScores& scores) {
  write_text_file(path, format_head_scores(scores));
}

}  // namespace kvpolicy::io
