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
#include <reference_model/repeat_request.hpp>
#include <reference_model/run.hpp>

namespace kvpolicy::reference {

/// The smallest part for which a text is worth reading again.
inline constexpr std::size_t least_repeated = 64;

/// Lets the cache's heads know how much attention the model pays to their rows when it repeats `text`, which is what
/// the cache holds. A part is shorter where the model was not trained for longer texts. `progress` is told of the
/// chunks of each pass, for each from 0 on.
/// @throws ShapeError if not even a part of `least_repeated` tokens fits, ConfigError for parts of 0 tokens; as prefill
/// and KvCache::take_scores
template <class Cache>
void score_by_repeating(const Llama& model, Cache& cache, std::span<const int> text, const RepeatRequest& ask,
                        std::size_t chunk = 512, const Progress& progress = {}) {
  require(ask.part > 0, "score_by_repeating: part is 0, must be at least 1");
  const std::size_t most = ask.beyond_context ? 0 : model.config().max_positions;
  const std::size_t words = std::max(ask.first.size(), ask.further.size() + ask.overlap);
  std::size_t part = ask.part;
  if (most > 0) {
    const std::size_t least = std::min({part, least_repeated, text.size()});
    const std::size_t taken = cache.tokens() + words;
    require<ShapeError>(taken + least <= most, "score_by_repeating: the cache holds ", cache.tokens(),
                        " tokens, the words that ask to repeat them are ", words, ", and a part is ", least,
                        " at least; the model was trained for ", most);
    part = std::min(part, most - taken);
  }
  for (std::size_t first = 0; first < text.size(); first += part) {
    std::vector<int> tokens = first == 0 ? ask.first : ask.further;
    const std::size_t from = first - std::min(first, ask.overlap);
    const std::span<const int> repeated = text.subspan(from, std::min(first + part, text.size()) - from);
    tokens.insert(tokens.end(), repeated.begin(), repeated.end());
    Cache pass = cache.fork();
    static_cast<void>(prefill(model, pass, tokens, chunk, progress, {.scores_rows = true}));
    cache.take_scores(pass);
  }
}

}  // namespace kvpolicy::reference
