// SPDX-License-Identifier: Apache-2.0
//
// What a tokenizer is besides its special tokens: something that turns text into tokens.
#pragma once

#include <string_view>
#include <vector>

namespace kvpolicy::reference {

/// Must be safe to call from several threads.
class TokenModel {
 public:
  TokenModel() = default;
  TokenModel(const TokenModel&) = delete;
  TokenModel& operator=(const TokenModel&) = delete;
  virtual ~TokenModel() = default;

  /// Appends the tokens of `text`, which holds no special token and is not empty. `at_start` says
  /// whether the whole text begins here.
  virtual void encode(std::string_view text, bool at_start, std::vector<int>& tokens) const = 0;

  /// Whether text is made valid UTF-8 before `encode` sees it.
  [[nodiscard]] virtual bool reads_utf8() const { return true; }
};

}  // namespace kvpolicy::reference
