// SPDX-License-Identifier: Apache-2.0
//
// The texts that DuoAttention's gates are trained on (arXiv:2410.10819, 2.2): passkeys hidden in a
// long text, followed by a question and an answer for each of them. The texts are bytes, for models
// whose tokens are bytes.
//
// There are two kinds. `words` is the published one: "the first passkey to the vault", 32 words
// each. `digits` is what the shipped model was trained to answer. Two things differ from the
// published set: a slice of the text begins anywhere and not always at its beginning, and digits
// are inserted where a sentence begins.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <common/text_model.hpp>
#include <reference_model/identify/labelled_text.hpp>

namespace kvpolicy::tools {

enum class PasskeyKind : std::uint8_t { digits, words };

struct PasskeyTextConfig {
  std::size_t context = 1024;  ///< tokens of the longest text, questions and answers included
  std::size_t lengths = 50;    ///< number of lengths, evenly spaced up to `context` from the shortest
                               ///< that has room for everything
  std::size_t passkeys = 10;
  std::size_t depths = 1000;  ///< evenly spaced from 5 % to 95 % of the text
  PasskeyKind kind = PasskeyKind::digits;
  std::uint64_t seed = 1;
};

/// Draws text `number` of a seed. Each run of `lengths` numbers has every length once, in a random
/// order of its own. Questions and answers are labelled.
/// @throws ConfigError for a context that has no room for the passkeys or is longer than `plain`
[[nodiscard]] reference::LabelledText passkey_text(const TextModel& model, std::string_view plain,
                                                   const PasskeyTextConfig& config, std::size_t number);

/// A slice of `plain` of one of the same lengths, in which every token but the first is labelled, as
/// in the training of a language model. @throws ConfigError as passkey_text
[[nodiscard]] reference::LabelledText plain_text(const TextModel& model, std::string_view plain,
                                                 const PasskeyTextConfig& config, std::size_t number);

}  // namespace kvpolicy::tools
