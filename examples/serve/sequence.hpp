// SPDX-License-Identifier: Apache-2.0
//
// A request on its way through the scheduler, which alone includes this.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <iterator>
#include <vector>

#include <reference_model/sampler.hpp>

#include "serve/scheduler.hpp"

namespace kvpolicy::serve {

struct Scheduler::Sequence {
  std::uint64_t id;
  Request request;
  tools::PlanNeeds needs;
  reference::Sampler sampler;
  double came;                    // when the request arrived
  double waits_since;             // when it last joined the queue
  bool is_out = false;            // it was moved out
  std::vector<int> written = {};  // of which the cache has not read the last one
  std::size_t cached = 0;
  std::size_t slice = 0;                          // tokens written since it came in
  std::size_t tried_at_change = ~std::size_t{0};  // when it did not fit, Scheduler::changes_ was this
  double last_token = 0;
  bool is_over = false;

  [[nodiscard]] bool reads() const { return written.empty(); }
  // Where the piece of the prompt ends that begins after `from` tokens. Pieces end at marks and at multiples of `most`,
  // so that they are the same ones wherever a prefix has ended.
  [[nodiscard]] std::size_t piece_end(std::size_t from, std::size_t most, std::size_t every) const {
    std::size_t end = std::min(request.prompt.size(), from - from % most + most);
    const auto mark = std::ranges::upper_bound(request.marks, from);
    if (mark != request.marks.end()) end = std::min(end, *mark);
    if (every > 0) end = std::min(end, from / every * every + every);
    return end;
  }
  [[nodiscard]] bool is_mark(std::size_t tokens, std::size_t every) const {
    if (tokens == 0 || tokens >= request.prompt.size()) return false;
    return std::ranges::binary_search(request.marks, tokens) || (every > 0 && tokens % every == 0);
  }
  // The last mark of the prompt that is not beyond `tokens`; 0 if there is none.
  [[nodiscard]] std::size_t last_mark(std::size_t tokens, std::size_t every) const {
    tokens = std::min(tokens, request.prompt.size() - 1);
    const auto after = std::ranges::upper_bound(request.marks, tokens);
    const std::size_t named = after == request.marks.begin() ? 0 : *std::prev(after);
    return std::max(named, every > 0 ? tokens / every * every : 0);
  }
};

}  // namespace kvpolicy::serve
