// SPDX-License-Identifier: Apache-2.0
//
// A text that heads are identified on: its tokens, and which of them count in a loss. Callers
// decide how texts are made; examples/identify hides passkeys in text as the shipped model knows
// it.
#pragma once

#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {

/// A passkey, which occurs twice in a text.
struct Passkey {
  std::size_t hidden = 0;  ///< position of its first token where it is hidden
  std::size_t answer = 0;  ///< position of its first token in the answer
  std::size_t tokens = 0;  ///< the same number at both positions
};

struct LabelledText {
  std::vector<int> tokens;
  std::vector<std::size_t> labels;  ///< positions that count in a loss, ascending
  std::vector<Passkey> passkeys;    ///< none in plain text

  /// @throws ShapeError for no labels, or a position outside the text
  void check() const {
    require<ShapeError>(!labels.empty(), "LabelledText: no token is labelled");
    for (const std::size_t label : labels) {
      require<ShapeError>(label < tokens.size(), "LabelledText: label at ", label, ", the text has ",
                          tokens.size(), " tokens");
    }
    for (const Passkey& key : passkeys) {
      require<ShapeError>(
          key.tokens > 0 && key.hidden + key.tokens <= key.answer && key.answer + key.tokens <= tokens.size(),
          "LabelledText: a passkey of ", key.tokens, " tokens at ", key.hidden, " is answered at ",
          key.answer, " of ", tokens.size());
    }
  }
};

/// The same text with labels on the passkeys' answers only.
[[nodiscard]] inline LabelledText answers_of(LabelledText text) {
  text.labels.clear();
  for (const Passkey& key : text.passkeys) {
    for (std::size_t i = 0; i < key.tokens; ++i) text.labels.push_back(key.answer + i);
  }
  return text;
}

}  // namespace kvpolicy::reference
