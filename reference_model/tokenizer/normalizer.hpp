// SPDX-License-Identifier: Apache-2.0
//
// Changes a text before it is cut into pieces.
#pragma once

#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include <reference_model/tokenizer/parts.hpp>
#include <reference_model/tokenizer/unicode.hpp>

namespace kvpolicy::reference {

class Normalizer {
 public:
  /// @throws FormatError, naming `origin`, for a pattern that cannot be compiled
  Normalizer(const std::vector<NormalizerStep>& steps, std::string_view origin);

  [[nodiscard]] std::string apply(std::string_view text) const;

 private:
  struct Step {
    NormalizerStep what;
    std::optional<Pattern> pattern;
  };
  std::vector<Step> steps_;
};

}  // namespace kvpolicy::reference
