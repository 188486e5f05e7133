// SPDX-License-Identifier: Apache-2.0
//
// A long prompt read by all ranks at once (context parallelism): each has some of the tokens and the whole weights, so
// it computes all heads of its own tokens and none of the others' (plan/prompt_moves.hpp). Keys and values travel,
// layer by layer: of heads that read every row all of them, of windows the few rows before each block. A rank attends
// to what arrives from one other rank at a time, merged by log-sum-exp (Ring Attention, arXiv:2310.01889, whose ranks
// pass rows on to their neighbours; here they send them to whoever reads them, and nobody else). What a rank is to hold
// for decoding goes into its RankCache, where ParallelLlama continues.
//
//   RankCache<float> cache{plan, shards, ranks};
//   auto logits = prefill_over_ranks(llama, cache, prompt);
//   logits = ParallelLlama{llama, shards, ranks}.forward(std::array{token}, cache);
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include <kvpolicy/cache/call_checks.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/attention_state.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/rotary.hpp>
#include <kvpolicy/core/segment.hpp>
#include <kvpolicy/plan/prompt_moves.hpp>
#include <reference_model/llama.hpp>
#include <reference_model/parallel/communicator.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/rank_cache.hpp>
#include <reference_model/parallel/tensor_parts.hpp>

namespace kvpolicy::reference {

/// One rank's attention over its tokens of a prompt, layer by layer. All ranks make the same calls. What fails here is
/// thrown by `run`, at the end: other ranks wait for the rows of every layer, which are 0 after a failure.
template <Element E, class Engine>
class PromptAttention {
 public:
  /// `cache` has no tokens yet, and must outlive this. No message. @throws as `prompt_moves`; std::bad_alloc
  PromptAttention(RankCache<E, Engine>& cache, std::size_t tokens)
      : cache_{&cache}, ranks_{&cache.ranks()}, blocks_{tokens, ranks_->size()} {
    const ModelShape& shape = cache.plan().shape();
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      moves_.push_back(
          prompt_moves(cache.plan(), blocks_, layer, &cache.shards(), cache.options().max_rollback));
      // So that no message fails for want of memory.
      for (std::size_t distance = 1; distance < ranks_->size(); ++distance) {
        sent_.reserve(numbers_between(layer, ranks_->rank(), before(distance)));
        received_.reserve(numbers_between(layer, after(distance), ranks_->rank()));
      }
    }
  }

  [[nodiscard]] const PromptBlocks& blocks() const { return blocks_; }

  /// Does this rank's part, `work`, which calls this for each layer unless it fails or there are no tokens here.
  /// @throws what `work` or a call threw: ShapeError if a number does not fit E; as RankCache::add; where it was
  /// another rank's RankError; CommunicationError
  template <class Work>
  void run(Work work) {
    try {
      work();
    } catch (const CommunicationError&) {
      throw;
    } catch (...) {
      if (failed_ == nullptr) failed_ = std::current_exception();
    }
    while (layers_ < moves_.size()) {
      const LayerShape shape = cache_->plan().shape().layer(layers_);
      const TensorView<const float> none{nullptr, 0, shape.kv_heads, shape.head_dim};
      (*this)(layers_, {nullptr, 0, shape.q_heads, shape.head_dim}, none, none,
              {nullptr, 0, shape.q_heads, shape.head_dim});
    }
    fail_together(*ranks_, failed_);
  }

  /// q [own tokens, q_heads, head_dim], k and v are of the rank's own tokens, its earlier block's first; so is `out`.
  /// @throws CommunicationError
  void operator()(std::size_t layer, TensorView<const float> q, TensorView<const float> k,
                  TensorView<const float> v, TensorView<float> out) {
    shape_ = cache_->plan().shape().layer(layer);
    unless_failed([&] {
      check_range<E>("k", ConstTensor{k});
      check_range<E>("v", ConstTensor{v});
      begin(layer, k, v);
      take(own_rows(k.tokens), q, out, /*merges=*/false);
    });
    for (std::size_t distance = 1; distance < ranks_->size(); ++distance) {
      swap_rows(layer, distance);
      unless_failed([&] { take(received_rows(layer, after(distance)), q, out, /*merges=*/true); });
    }
    unless_failed([&] {
      const std::size_t parts = held_heads_.size();
      cache_->add(layer, TensorView<const E>{held_keys_.data(), blocks_.tokens(), parts, shape_.head_dim},
                  TensorView<const E>{held_values_.data(), blocks_.tokens(), parts, shape_.value_dim});
    });
    layers_ = layer + 1;
  }

 private:
  // Rows of a head that are here during a call.
  struct Piece {
    PromptMove move;  // of which `from` and `to` do not matter
    const E* keys = nullptr;
    const E* values = nullptr;
    std::size_t key_stride = 0, value_stride = 0;  // from row to row, in numbers
  };

  template <class Work>
  void unless_failed(Work work) {
    if (failed_ != nullptr) return;
    try {
      work();
    } catch (...) {
      failed_ = std::current_exception();
    }
  }

  // The rank `distance` before this one, to which it sends while that of as far after it sends to this.
  [[nodiscard]] std::size_t before(std::size_t distance) const {
    return (ranks_->rank() + ranks_->size() - distance) % ranks_->size();
  }
  [[nodiscard]] std::size_t after(std::size_t distance) const {
    return (ranks_->rank() + distance) % ranks_->size();
  }
  [[nodiscard]] std::size_t numbers_between(std::size_t layer, std::size_t from, std::size_t to) const {
    const LayerShape shape = cache_->plan().shape().layer(layer);
    std::size_t rows = 0;
    for (const PromptMove& move : moves_[layer]) {
      if (move.from == from && move.to == to) rows += move.count();
    }
    return rows * (shape.head_dim + shape.value_dim);
  }

  void begin(std::size_t layer, const TensorView<const float>& k, const TensorView<const float>& v) {
    const HeadPlan<E>& plan = cache_->plan();
    rules_.clear();
    frequencies_.clear();
    for (std::size_t head = 0; head < shape_.kv_heads; ++head) {
      const HeadRule& rule = rules_.emplace_back(plan.at(layer, head).rule(shape_.head_dim));
      frequencies_.push_back(rule.rotary_in_cache
                                 ? inverse_frequencies(*rule.rotary_in_cache, shape_.head_dim)
                                 : std::vector<float>{});
    }
    own_keys_ = rounded<E>(k);
    own_values_ = rounded<E>(v);
    held_heads_.clear();
    for (const HeadPart& part : parts_in_order(cache_->shards(), layer, ranks_->rank())) {
      held_heads_.push_back(part.head);
    }
    // Rows that no head here keeps stay 0: their policies drop them.
    held_keys_.assign(blocks_.tokens() * held_heads_.size() * shape_.head_dim, E{0.0F});
    held_values_.assign(blocks_.tokens() * held_heads_.size() * shape_.value_dim, E{0.0F});
  }

  [[nodiscard]] std::vector<Piece> own_rows(std::size_t tokens) const {
    std::vector<Piece> pieces;
    const std::size_t key_stride = shape_.kv_heads * shape_.head_dim;
    const std::size_t value_stride = shape_.kv_heads * shape_.value_dim;
    std::size_t first = 0;
    for (const RowRange<std::size_t>& block : blocks_.of_rank(ranks_->rank())) {
      for (std::size_t head = 0; head < shape_.kv_heads && block.rows() > 0; ++head) {
        pieces.push_back({{.head = head, .rows = block},
                          own_keys_.data() + first * key_stride + head * shape_.head_dim,
                          own_values_.data() + first * value_stride + head * shape_.value_dim,
                          key_stride,
                          value_stride});
      }
      first += block.rows();
    }
    require<ShapeError>(tokens == first, "PromptAttention: ", tokens, " tokens, this rank has ", first,
                        " of ", blocks_.tokens());
    return pieces;
  }

  // Sends rows to the rank `distance` before this one, and receives those of the rank as far after it.
  void swap_rows(std::size_t layer, std::size_t distance) {
    const std::size_t to = before(distance);
    const std::size_t from = after(distance);
    sent_.clear();
    for (const PromptMove& move : moves_[layer]) {
      if (move.from != ranks_->rank() || move.to != to) continue;
      pack(move, own_keys_, shape_.head_dim);
      pack(move, own_values_, shape_.value_dim);
    }
    sent_.resize(numbers_between(layer, ranks_->rank(), to), E{0.0F});
    received_.resize(numbers_between(layer, from, ranks_->rank()));
    const std::array<Outgoing, 1> out{{{to, std::as_bytes(std::span<const E>{sent_})}}};
    const std::array<Incoming, 1> in{{{from, std::as_writable_bytes(std::span<E>{received_})}}};
    ranks_->exchange(out, in);
  }
  // What the latest message has brought, from that rank.
  [[nodiscard]] std::vector<Piece> received_rows(std::size_t layer, std::size_t from) const {
    std::vector<Piece> pieces;
    const E* keys = received_.data();
    for (const PromptMove& move : moves_[layer]) {
      if (move.from != from || move.to != ranks_->rank()) continue;
      const E* values = keys + move.count() * shape_.head_dim;
      pieces.push_back({move, keys, values, shape_.head_dim, shape_.value_dim});
      keys = values + move.count() * shape_.value_dim;
    }
    return pieces;
  }

  // Appends the rows of `move`, all of which are this rank's own, of keys or of values.
  void pack(const PromptMove& move, const std::vector<E>& own, std::size_t channels) {
    if (failed_ != nullptr) return;  // rows of 0 go instead
    const auto [earlier, later] = blocks_.of_rank(ranks_->rank());
    for (std::size_t row = move.rows.begin; row < move.rows.end; ++row) {
      if (!move.share.has(row)) continue;
      const std::size_t token = row < earlier.end ? row - earlier.begin : earlier.rows() + row - later.begin;
      const E* from = own.data() + (token * shape_.kv_heads + move.head) * channels;
      sent_.insert(sent_.end(), from, from + channels);
    }
  }

  // Attends to rows that are here, and keeps those that are to stay.
  void take(const std::vector<Piece>& pieces, const TensorView<const float>& q, const TensorView<float>& out,
            bool merges) {
    for (const Piece& piece : pieces) keep(piece);
    if (!merges) log_sum_exp_.assign(q.tokens * q.heads, 0.0F);
    std::size_t first = 0;
    for (const RowRange<std::size_t>& block : blocks_.of_rank(ranks_->rank())) {
      attend(pieces, block, q.slice(first, block.rows()), out.slice(first, block.rows()),
             std::span{log_sum_exp_}.subspan(first * q.heads, block.rows() * q.heads), merges);
      first += block.rows();
    }
  }

  void keep(const Piece& piece) {
    const auto found = std::ranges::find(held_heads_, piece.move.head);
    if (found == held_heads_.end()) return;
    const auto place = static_cast<std::size_t>(found - held_heads_.begin());
    std::size_t index = 0;
    for (std::size_t row = piece.move.rows.begin; row < piece.move.rows.end; ++row) {
      if (!piece.move.share.has(row)) continue;
      const std::size_t to = row * held_heads_.size() + place;
      std::copy_n(piece.keys + index * piece.key_stride, shape_.head_dim,
                  held_keys_.data() + to * shape_.head_dim);
      std::copy_n(piece.values + index * piece.value_stride, shape_.value_dim,
                  held_values_.data() + to * shape_.value_dim);
      ++index;
    }
  }

  void attend(const std::vector<Piece>& pieces, const RowRange<std::size_t>& block,
              const TensorView<const float>& q, const TensorView<float>& out, std::span<float> log_sum_exp,
              bool merges) {
    if (block.rows() == 0) return;
    std::vector<SegmentList> shown(shape_.kv_heads);
    bool any = false;
    for (const Piece& piece : pieces) {
      // Rows of a share are for later.
      if (!piece.move.share.is_whole()) continue;
      show(piece, block, shown[piece.move.head]);
      any = any || !shown[piece.move.head].empty();
    }
    if (!any) return;
    const std::vector<std::span<const Segment>> heads{shown.begin(), shown.end()};
    LayerAttention work;
    work.queries = ConstTensor{q};
    work.out = MutableTensor{out};
    work.first_position = static_cast<std::int64_t>(block.begin);
    work.heads = heads;
    work.options.softcap = shape_.softcap;
    work.options.log_sum_exp = log_sum_exp;
    if (merges) {
      part_.resize(q.tokens * q.heads * shape_.value_dim);
      part_log_sum_exp_.resize(log_sum_exp.size());
      work.out = MutableTensor{TensorView<float>{part_.data(), q.tokens, q.heads, shape_.value_dim}};
      work.options.log_sum_exp = part_log_sum_exp_;
    }
    cache_->engine().attend(work);
    if (!merges) return;
    for (std::size_t token = 0; token < q.tokens; ++token) {
      for (std::size_t head = 0; head < q.heads; ++head) {
        if (shown[head / shape_.queries_per_kv()].empty()) continue;
        const std::size_t query = token * q.heads + head;
        log_sum_exp[query] = merge_outputs(
            {out.row(token, head), shape_.value_dim}, log_sum_exp[query],
            std::span{part_}.subspan(query * shape_.value_dim, shape_.value_dim), part_log_sum_exp_[query]);
      }
    }
  }

  // The rows of a piece that queries of a block read, as SinkRecentCache shows those of a call.
  void show(const Piece& piece, const RowRange<std::size_t>& block, SegmentList& list) {
    const HeadRule& rule = rules_[piece.move.head];
    const WindowRule<std::size_t> window = rule.window_rule();
    const RowRange<std::size_t> all{piece.move.rows.begin, std::min(piece.move.rows.end, block.end)};
    const auto plane = [](const E* first, std::size_t stride) {
      return Plane{.format = {.encoding = encoding_of<E>},
                   .base = reinterpret_cast<const std::byte*>(first),
                   .row_stride = stride * sizeof(E)};
    };
    const auto add = [&](const RowRange<std::size_t>& rows) -> Segment& {
      const std::size_t skipped = rows.begin - piece.move.rows.begin;
      Segment& segment = list.emplace_back();
      segment.keys = plane(piece.keys + skipped * piece.key_stride, piece.key_stride);
      segment.values = plane(piece.values + skipped * piece.value_stride, piece.value_stride);
      segment.rows = rows.rows();
      segment.position = static_cast<std::int64_t>(rows.begin);
      return segment;
    };
    if (all.rows() == 0) return;
    if (const auto sinks = window.sinks_among(all); sinks.rows() > 0) {
      Segment& segment = add(sinks);
      if (rule.rotary_in_cache) {
        segment.rotation = {frequencies_[piece.move.head].data(),
                            static_cast<std::int64_t>(rule.sinks + rule.recent) - 1};
      }
    }
    const auto recent = window.recent_among(all, rule.prefill_chunk_mask ? 0 : block.begin);
    if (recent.rows() > 0) add(recent).window = window.query_window(unlimited_window);
  }

  RankCache<E, Engine>* cache_;
  Communicator* ranks_;
  PromptBlocks blocks_;
  std::vector<std::vector<PromptMove>> moves_;  // [layers], of all ranks
  std::size_t layers_ = 0;                      // that are done
  std::exception_ptr failed_;                   // the first of this rank's errors
  // Of the call in progress.
  LayerShape shape_;
  std::vector<HeadRule> rules_;
  std::vector<std::vector<float>> frequencies_;  // of heads with in-cache positions
  std::vector<E> own_keys_, own_values_;         // [own tokens, kv_heads, channels]
  std::vector<std::size_t> held_heads_;          // as in `parts_in_order`
  std::vector<E> held_keys_, held_values_;       // [tokens, held heads, channels]
  std::vector<E> sent_, received_;
  std::vector<float> log_sum_exp_, part_, part_log_sum_exp_;
};

namespace detail {

// Sends every rank's rows [own tokens, width] to all others: `all` is in the order of the text.
inline void share_rows(Communicator& ranks, const PromptBlocks& blocks, std::span<const float> own,
                       std::size_t width, std::span<float> all) {
  std::vector<Outgoing> sent;
  std::vector<Incoming> received;
  for (std::size_t other = 0; other < ranks.size(); ++other) {
    std::size_t first = 0;
    for (const RowRange<std::size_t>& block : blocks.of_rank(other)) {
      const std::span<float> rows = all.subspan(block.begin * width, block.rows() * width);
      if (other != ranks.rank()) {
        received.push_back({other, std::as_writable_bytes(rows)});
        continue;
      }
      const std::span<const float> mine = own.subspan(first * width, block.rows() * width);
      std::ranges::copy(mine, rows.begin());
      for (std::size_t to = 0; to < ranks.size(); ++to) {
        if (to != other) sent.push_back({to, std::as_bytes(mine)});
      }
      first += block.rows();
    }
  }
  ranks.exchange(sent, received);
}

}  // namespace detail

/// Reads a prompt into an empty cache, and returns logits as Llama::forward of the whole prompt in one call does, the
/// same on every rank. `model` is the whole one, on every rank.
/// @throws ShapeError for no tokens, or one outside the vocabulary; ConfigError for a cache that holds tokens or keeps
/// queries, a plan of another shape or with budgets, if ranks have another model or prompt; CapacityError for a text
/// longer than `max_tokens`; RollbackError as RankCache::require_even; where another rank failed RankError;
/// CommunicationError. After an error in the middle the cache is of no further use.
template <Element E, class Engine>
[[nodiscard]] std::vector<float> prefill_over_ranks(const Llama& model, RankCache<E, Engine>& cache,
                                                    std::span<const int> tokens,
                                                    LogitsOf logits = LogitsOf::last) {
  Communicator& ranks = cache.ranks();
  const LlamaConfig& config = model.config();
  require_same_model(ranks, model);
  require_same_tokens(ranks, tokens, {}, std::array{static_cast<std::size_t>(logits)});
  require<ShapeError>(!tokens.empty(), "prefill_over_ranks: no tokens, expected at least 1");
  for (const int token : tokens) {
    require<ShapeError>(token >= 0 && static_cast<std::size_t>(token) < config.vocabulary,
                        "prefill_over_ranks: token ", token, " is outside the vocabulary of ",
                        config.vocabulary);
  }
  require(cache.plan().shape() == config.shape(),
          "prefill_over_ranks: the plan is of another shape than the model");
  cache.require_even();
  require(cache.tokens() == 0, "prefill_over_ranks: the cache holds ", cache.tokens(),
          " tokens, must be empty; read what follows them with ParallelLlama::forward");
  const CacheOptions& options = cache.options();
  require(options.kept_queries == 0, "prefill_over_ranks: kept_queries is ", options.kept_queries,
          ", must be 0: the queries of a prompt stay where its tokens are");
  require<CapacityError>(options.max_tokens == 0 || tokens.size() <= options.max_tokens,
                         "prefill_over_ranks: ", tokens.size(),
                         " tokens, must be at most max_tokens = ", options.max_tokens);
  std::optional<PromptAttention<E, Engine>> attention;
  together(ranks, [&] { attention.emplace(cache, tokens.size()); });
  const PromptBlocks& blocks = attention->blocks();
  const std::size_t count = logits == LogitsOf::all ? tokens.size() : logits == LogitsOf::last ? 1 : 0;
  std::vector<float> found, all;
  attention->run([&] {
    std::vector<int> own;
    std::vector<std::size_t> positions;
    for (const RowRange<std::size_t>& block : blocks.of_rank(ranks.rank())) {
      for (std::size_t at = block.begin; at < block.end; ++at) {
        own.push_back(tokens[at]);
        positions.push_back(at);
      }
    }
    all.resize(count * config.vocabulary);
    if (own.empty()) return;  // what other ranks send may still be for this one to hold
    const bool has_last = blocks.rank_of(blocks.size() - 1) == ranks.rank();
    const LogitsOf wanted = logits == LogitsOf::last && !has_last ? LogitsOf::none : logits;
    found = model.forward(own, positions, std::ref(*attention), wanted);
  });
  if (logits == LogitsOf::none) return {};
  // The last token is one text of one token, which has one block.
  detail::share_rows(ranks, PromptBlocks{count, ranks.size()}, found, config.vocabulary, all);
  return all;
}

}  // namespace kvpolicy::reference
