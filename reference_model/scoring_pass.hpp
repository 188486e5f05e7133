// SPDX-License-Identifier: Apache-2.0
//
// The passes of KVzip (policy/kvzip_scorer.hpp) through a model: it is asked to repeat its context, part by part, over
// forks of the cache that holds it, and the cache learns how much attention that takes of each row.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::reference {

/// How a text is to be repeated, in tokens.
struct RepeatRequest {
  std::vector<int> first;    ///< words that ask to repeat the context, from its beginning
  std::vector<int> further;  ///< words that ask for the part that starts with the tokens that follow them
  std::size_t part = 2048;   ///< tokens that are repeated at a time, as published
  std::size_t overlap = 8;   ///< tokens before a part that say where it starts, as published
};

/// The published words, which `encode(std::string)` makes tokens of.
template <class Encode>
[[nodiscard]] RepeatRequest repeat_request(Encode encode) {
  return {encode("\n\nRepeat the previous context exactly.\n\n"),
          encode("\n\nRepeat the part of the previous context exactly, starting with ")};
}

/// Lets the cache's heads know how much attention the model pays to their rows when it repeats `text`, which is what the
/// cache holds. A part is shorter where the model's longest text would be exceeded.
/// @throws ShapeError if no token more would fit; as prefill and KvCache::take_scores
template <class Cache>
void score_by_repeating(const Llama& model, Cache& cache, std::span<const int> text, const RepeatRequest& ask,
                        std::size_t chunk = 512) {
  const std::size_t most = model.config().max_positions;
  const std::size_t words = std::max(ask.first.size(), ask.further.size() + ask.overlap);
  std::size_t part = ask.part;
  if (most > 0) {
    const std::size_t taken = cache.tokens() + words;
    require<ShapeError>(taken < most, "score_by_repeating: the cache holds ", cache.tokens(),
                        " tokens and the words that ask to repeat them are ", words,
                        "; the model reads at most ", most);
    part = std::min(part, most - taken);
  }
  for (std::size_t first = 0; first < text.size(); first += part) {
    std::vector<int> tokens = first == 0 ? ask.first : ask.further;
    const std::size_t from = first - std::min(first, ask.overlap);
    const std::span<const int> repeated = text.subspan(from, std::min(first + part, text.size()) - from);
    tokens.insert(tokens.end(), repeated.begin(), repeated.end());
    Cache pass = cache.fork();
    static_cast<void>(prefill(model, pass, tokens, chunk, {}, {.scores_rows = true}));
    cache.take_scores(pass);
  }
}

}  // namespace kvpolicy::reference
