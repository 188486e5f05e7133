// SPDX-License-Identifier: Apache-2.0
//
// Divides a long prompt's tokens among ranks (context parallelism), and says which rows of which head each rank needs
// of which other one. A rank computes queries, keys and values of its own tokens. Attention over a head that reads
// every row needs the rows of all ranks before; a head with a window needs its sinks and the rows right before each
// block, however long the prompt is. After the prompt rows have to be where decoding wants them (plan/shards.hpp), and
// of a window only what its policy keeps.
//
// A rank has one block near the beginning and one near the end, block r and block 2 * ranks - 1 - r, so that all have
// the same share of causal attention (Llama 3, arXiv:2407.21783, 3.3.2).
//
// The transport is the engine's: this says which rows go where.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/head_rule.hpp>
#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/core/rule_ranges.hpp>
#include <kvpolicy/plan/cache_options.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/shard_layer.hpp>
#include <kvpolicy/plan/shards.hpp>

namespace kvpolicy {

/// The tokens of a prompt in two blocks for each rank. Blocks have nearly the same length, and none of a short prompt's
/// need have a token.
class PromptBlocks {
 public:
  /// @throws ConfigError for no ranks or more than 1,024; CapacityError for a text of more than 2^40 tokens
  PromptBlocks(std::size_t tokens, std::size_t ranks) : tokens_{tokens}, ranks_{ranks} {
    require(ranks >= 1 && ranks <= 1024, "PromptBlocks: ranks is ", ranks, ", must be 1 to 1024");
    check_text_tokens("PromptBlocks", tokens);
  }

  [[nodiscard]] std::size_t tokens() const { return tokens_; }
  [[nodiscard]] std::size_t ranks() const { return ranks_; }
  /// Number of blocks.
  [[nodiscard]] std::size_t size() const { return 2 * ranks_; }
  /// The tokens of a block. Requires block < size().
  [[nodiscard]] RowRange<std::size_t> block(std::size_t number) const {
    return {tokens_ * number / size(), tokens_ * (number + 1) / size()};
  }
  /// The rank that has a block.
  [[nodiscard]] std::size_t rank_of(std::size_t number) const {
    return std::min(number, size() - 1 - number);
  }
  /// The tokens of a rank: its earlier block and its later one. Requires rank < ranks().
  [[nodiscard]] std::array<RowRange<std::size_t>, 2> of_rank(std::size_t rank) const {
    return {block(rank), block(size() - 1 - rank)};
  }

 private:
  std::size_t tokens_, ranks_;
};

/// Rows of a head, keys and values, that one rank computes and another one needs: of `rows`, those of `share`.
struct PromptMove {
  std::size_t from = 0;
  std::size_t to = 0;
  std::size_t head = 0;
  RowRange<std::size_t> rows = {};
  RowShare share = {};

  /// How many rows move.
  [[nodiscard]] std::size_t count() const { return share.rows_of(rows.end) - share.rows_of(rows.begin); }

  friend bool operator==(const PromptMove&, const PromptMove&) = default;
};

/// The rows before text position `first` that queries from there on read of a head, if the whole prompt is one call:
/// sinks, then the others.
[[nodiscard]] inline std::array<RowRange<std::size_t>, 2> rows_read_before(const HeadRule& rule,
                                                                           std::size_t first) {
  const WindowRule<std::size_t> window = rule.window_rule();
  const std::size_t oldest = window.first_read(rule.prefill_chunk_mask ? 0 : first);
  return {{{0, std::min(rule.sinks, first)}, {std::min(oldest, first), first}}};
}

namespace detail {

// Ascending, without what lies in two of them.
[[nodiscard]] inline std::vector<RowRange<std::size_t>> united(std::vector<RowRange<std::size_t>> ranges) {
  std::erase_if(ranges, [](const RowRange<std::size_t>& one) { return one.rows() == 0; });
  std::ranges::sort(ranges, {}, &RowRange<std::size_t>::begin);
  std::vector<RowRange<std::size_t>> result;
  for (const RowRange<std::size_t>& one : ranges) {
    if (!result.empty() && one.begin <= result.back().end) {
      result.back().end = std::max(result.back().end, one.end);
    } else {
      result.push_back(one);
    }
  }
  return result;
}

[[nodiscard]] inline RowRange<std::size_t> common(const RowRange<std::size_t>& a,
                                                  const RowRange<std::size_t>& b) {
  const std::size_t begin = std::max(a.begin, b.begin);
  return {begin, std::max(begin, std::min(a.end, b.end))};
}

inline void check_read_over_ranks(const HeadRule& rule, std::size_t layer, std::size_t head) {
  require(!rule.compresses, "prompt_moves: head ", head, " of layer ", layer,
          " has a budget, for which its rank needs more than rows: the queries or the attention that rank "
          "them; read "
          "the prompt in chunks (as ParallelLlama::forward does)");
}

// What `to` needs of a head: `wanted`, ascending, and of blocks of which that is nothing, those of `held` where the
// head is cut. A cut head reads every row, so it wants whole blocks.
inline void add_moves(const PromptBlocks& blocks, std::size_t to, std::size_t head,
                      const std::vector<RowRange<std::size_t>>& wanted, const RowShare* held,
                      std::vector<PromptMove>& moves) {
  for (std::size_t number = 0; number < blocks.size(); ++number) {
    const RowRange<std::size_t> block = blocks.block(number);
    const std::size_t from = blocks.rank_of(number);
    if (from == to) continue;
    const std::size_t before = moves.size();
    for (const RowRange<std::size_t>& range : wanted) {
      const RowRange<std::size_t> part = common(range, block);
      if (part.rows() > 0) moves.push_back({from, to, head, part});
    }
    if (held == nullptr || moves.size() > before) continue;
    const PromptMove move{from, to, head, block, *held};
    if (move.count() > 0) moves.push_back(move);
  }
}

}  // namespace detail

/// The rows of a layer that ranks need of each other for a prompt's attention and, with `shards`, to hold afterwards
/// what these give them; `max_rollback` as in CacheOptions. Moves are in the order of the ranks that receive, then of
/// heads, then of rows; no row moves between the same two ranks twice.
/// @throws ConfigError for a head with a budget, or one that is cut and does not keep every row and read it; if there
/// is no such layer, or the shards are of another shape or number of ranks
template <class... T>
[[nodiscard]] std::vector<PromptMove> prompt_moves(const HeadPlan<T...>& plan, const PromptBlocks& blocks,
                                                   std::size_t layer, const Shards* shards = nullptr,
                                                   std::size_t max_rollback = 0) {
  const ModelShape& shape = plan.shape();
  require(layer < shape.layers, "prompt_moves: there is no layer ", layer, ", the plan has ", shape.layers);
  if (shards != nullptr) {
    require(shards->ranks() == blocks.ranks(), "prompt_moves: shards for ", shards->ranks(),
            " ranks, the prompt is divided among ", blocks.ranks());
    require(shards->layers() == shape.layers, "prompt_moves: shards of ", shards->layers(),
            " layers, the plan has ", shape.layers);
  }
  const LayerShape own = shape.layer(layer);
  std::vector<PromptMove> moves;
  for (std::size_t to = 0; to < blocks.ranks(); ++to) {
    for (std::size_t head = 0; head < own.kv_heads; ++head) {
      const HeadRule rule = plan.at(layer, head).rule(own.head_dim);
      detail::check_read_over_ranks(rule, layer, head);
      std::vector<RowRange<std::size_t>> wanted;
      for (const RowRange<std::size_t>& block : blocks.of_rank(to)) {
        if (block.rows() == 0) continue;
        for (const RowRange<std::size_t>& part : rows_read_before(rule, block.begin)) wanted.push_back(part);
      }
      const RowShare* held = nullptr;
      if (shards != nullptr) {
        for (const HeadPart& part : shards->parts(layer, to)) {
          if (part.head != head) continue;
          if (!part.rows.is_whole()) {
            require(can_cut(rule, false), "prompt_moves: head ", head, " of layer ", layer,
                    " is cut by rows, and does not keep every row and read it; give it to one rank");
            held = &part.rows;
            continue;
          }
          // The policy has the rows that cannot be taken back; the others follow them in the cache.
          const std::size_t committed = blocks.tokens() - std::min(blocks.tokens(), max_rollback);
          wanted.push_back({0, std::min(rule.sinks, blocks.tokens())});
          wanted.push_back(
              {std::min(rule.recent == 0 ? 0 : rule.window_rule().first_kept(committed), blocks.tokens()),
               blocks.tokens()});
        }
      }
      detail::add_moves(blocks, to, head, detail::united(std::move(wanted)), held, moves);
    }
  }
  return moves;
}

/// Bytes of the rows of a layer that move, in a cache whose numbers have `element_bytes` bytes.
[[nodiscard]] inline std::size_t bytes_moved(std::span<const PromptMove> moves, const LayerShape& layer,
                                             std::size_t element_bytes) {
  std::size_t rows = 0;
  for (const PromptMove& move : moves) rows += move.count();
  const std::size_t value_dim = layer.value_dim == 0 ? layer.head_dim : layer.value_dim;
  return rows * (layer.head_dim + value_dim) * element_bytes;
}

}  // namespace kvpolicy
