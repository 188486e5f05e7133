// SPDX-License-Identifier: Apache-2.0
//
// Helpers for tests of decoders over table models: the text that plain greedy decoding writes, and a
// target and a small model with their caches.
#pragma once

#include <algorithm>
#include <cstddef>
#include <span>
#include <vector>

#include <kvpolicy/speculation/decoder.hpp>
#include <kvpolicy/speculation/model_draft.hpp>
#include <kvpolicy/speculation/selected_draft.hpp>
#include <kvpolicy/speculation/tree_draft.hpp>

#include "table_cache.hpp"
#include "table_model.hpp"

namespace test {

/// `count` tokens after `prompt`, each the likeliest one: from the table, without cache or decoder.
inline std::vector<int> plain_greedy(const TableModel& model, std::vector<int> prompt, std::size_t count) {
  for (std::size_t i = 0; i < count; ++i) {
    const int before = prompt.size() < 2 ? static_cast<int>(model.vocabulary()) : prompt[prompt.size() - 2];
    const std::span<const float> logits = model.logits(before, prompt.back());
    prompt.push_back(static_cast<int>(std::ranges::max_element(logits) - logits.begin()));
  }
  return prompt;
}

inline std::vector<int> copy(std::span<const int> tokens) { return {tokens.begin(), tokens.end()}; }

using Small = kvpolicy::ModelDraft<TableModel, TableCache>;
using Tree = kvpolicy::TreeDraft<TableModel, TableCache>;
template <class Inner = kvpolicy::NoDraft>
using Selected = kvpolicy::SelectedDraft<TableModel, TableCache, Inner>;
template <class Draft>
using Decoder = kvpolicy::SpeculativeDecoder<TableModel, TableCache, Draft>;

/// A target, and a small model that often agrees with it.
struct Pair {
  TableModel target{6, 33, 2.0F, 0.5F};
  TableModel small = target.like(34, 0.8F);
  TableCache cache{};
  TableCache small_cache{};
  std::vector<int> prompt{3, 1, 4, 1, 5};

  Small small_draft() { return Small{small, small_cache}; }
  Selected<Small> hierarchy(std::size_t inner = 2) {
    return Selected<Small>{target, cache, small_draft(), {inner, false}};
  }
  Tree tree(std::vector<std::size_t> parents) {
    return Tree{small, small_cache, kvpolicy::TokenTree{parents}};
  }
};

/// Options of a decoder with a fixed number of draft tokens.
inline kvpolicy::SpeculationOptions fixed(std::size_t length, kvpolicy::SamplingOptions sampling = {}) {
  return {.sampling = sampling, .seed = 5, .length = length, .adapt = false};
}

}  // namespace test
