// SPDX-License-Identifier: Apache-2.0
//
// Runs the checkpoints of tests/model/goldens, which make_goldens.py makes.
#pragma once

#include <algorithm>
#include <array>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include <reference_model/llama.hpp>
#include <reference_model/safetensors.hpp>

#include "support/source_dir.hpp"

namespace kvpolicy::reference {

inline constexpr std::array golden_names{
    "mha_d64",        "gqa2_d80",        "gqa7_d64",       "tied_d64",
    "all_biases",     "qwen2_bias_gqa7", "llama3_scaling", "qwen2_window_upper_layers",
    "linear_scaling", "mistral_window",  "sharded_bf16",   "f16_d128",
    "qwen3_norms",
};

/// The largest error allowed in a logit. The logits of the goldens spread over several units.
inline constexpr float logit_tolerance = 1e-4F;

inline std::string golden_folder(const std::string& name) {
  return testing::source_dir() + "/tests/model/goldens/" + name;
}

struct Golden {
  std::vector<int> tokens;
  std::vector<float> logits;  // [tokens, vocabulary]
};

inline Golden load_golden(const std::string& name) {
  SafetensorsFile file(golden_folder(name) + "/golden.safetensors");
  const std::vector<std::byte> bytes = file.read_bytes("tokens");
  std::vector<std::int64_t> tokens(bytes.size() / sizeof(std::int64_t));
  std::memcpy(tokens.data(), bytes.data(), bytes.size());
  return {std::vector<int>(tokens.begin(), tokens.end()), file.read_floats("logits")};
}

/// The logits of all tokens, read in chunks of `chunk`, or at once if it is 0.
inline std::vector<float> all_logits(const Llama& model, std::span<const int> tokens, std::size_t chunk,
                                     const AttendFn& attend) {
  std::vector<float> logits;
  const std::size_t most = chunk == 0 ? tokens.size() : chunk;
  for (std::size_t first = 0; first < tokens.size(); first += most) {
    const auto part = tokens.subspan(first, std::min(most, tokens.size() - first));
    const std::vector<float> some = model.forward(part, first, attend, LogitsOf::all);
    logits.insert(logits.end(), some.begin(), some.end());
  }
  return logits;
}

/// The largest difference; infinite if sizes differ or a number is NaN.
inline float largest_error(std::span<const float> a, std::span<const float> b) {
  if (a.size() != b.size() || a.empty()) return INFINITY;
  float largest = 0;
  for (std::size_t i = 0; i < a.size(); ++i) {
    const float error = std::fabs(a[i] - b[i]);
    if (!(error <= largest)) largest = std::isnan(error) ? INFINITY : error;
  }
  return largest;
}

}  // namespace kvpolicy::reference
