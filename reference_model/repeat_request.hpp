// SPDX-License-Identifier: Apache-2.0
//
// The words with which a model is asked to repeat its context (scoring_pass.hpp).
#pragma once

#include <cstddef>
#include <vector>

namespace kvpolicy::reference {

/// How a text is to be repeated, in tokens.
struct RepeatRequest {
  std::vector<int> first;       ///< words that ask to repeat the context, from its beginning
  std::vector<int> further;     ///< words that ask for the part that starts with the tokens that follow them
  std::size_t part = 2048;      ///< tokens that are repeated at a time, as published
  std::size_t overlap = 8;      ///< tokens before a part that say where it starts, as published
  bool beyond_context = false;  ///< also at positions that the model was not trained for
};

/// The published words, which `encode(std::string)` makes tokens of.
template <class Encode>
[[nodiscard]] RepeatRequest repeat_request(Encode encode) {
  return {encode("\n\nRepeat the previous context exactly.\n\n"),
          encode("\n\nRepeat the part of the previous context exactly, starting with ")};
}

}  // namespace kvpolicy::reference
