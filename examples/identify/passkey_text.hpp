// SPDX-License-Identifier: Apache-2.0
//
// The texts that DuoAttention's gates are trained on (arXiv:2410.10819, 2.2): passkeys hidden in a
// long text, and behind it a question for each with its answer. In bytes, for models of bytes.
//
// Two kinds. `words` is the published one: "the first passkey to the vault", 32 words each. `digits`
// is what the shipped model was trained to answer. Differences from the published set: a slice of
// the text begins anywhere, not always at its beginning, and digits go where a sentence begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <reference_model/identify/labelled_text.hpp>

namespace kvpolicy::tools {

enum class PasskeyKind : std::uint8_t { digits, words };

struct PasskeyTextConfig {
  std::size_t context = 1024;  ///< bytes of the longest text, questions and answers included
  std::size_t lengths = 50;    ///< evenly from the shortest that holds everything to `context`
  std::size_t passkeys = 10;
  std::size_t depths = 1000;   ///< evenly from 5 % to 95 % of the text
  PasskeyKind kind = PasskeyKind::digits;
  std::uint64_t seed = 1;
};

/// Text `number` of a seed. Each run of `lengths` numbers takes every length once, in an order of its
/// own. Questions and answers are labelled.
/// @throws ConfigError for a context that cannot hold the passkeys or is longer than `plain`.
[[nodiscard]] reference::LabelledText passkey_text(std::string_view plain,
                                                   const PasskeyTextConfig& config,
                                                   std::size_t number);

/// A slice of `plain` of one of the same lengths, every byte of it labelled but the first: what a
/// language model is trained on. @throws ConfigError as there
[[nodiscard]] reference::LabelledText plain_text(std::string_view plain,
                                                 const PasskeyTextConfig& config,
                                                 std::size_t number);

}  // namespace kvpolicy::tools
