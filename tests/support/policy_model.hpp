// SPDX-License-Identifier: Apache-2.0
//
// Slow models of the promises of each policy, as sets of text positions: which rows live, which of them are
// exact, and which rows a query reads. One model is one KV head. It shares no header with the library.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <map>
#include <set>
#include <vector>

namespace oracle {

enum class Kind { full, window, budget, retrieval };

/// The scorers that rank the rows of a head with a budget.
enum class Rank { snapkv, tova, h2o, key_norm, key_diff, expected };

/// What codes stand for.
enum class Codebook { even, normal, fp8, mxfp4, nvfp4 };

/// The settings of a head, with the meaning of the library's configs.
struct HeadSpec {
  Kind kind = Kind::full;
  // window; a quantised head that keeps every row may have sinks as well
  std::size_t sinks = 0, recent = 0;
  bool prefill_chunk_mask = false;
  bool in_cache = false;
  // for a budget; `window` is the number of latest rows that are always kept (0 for TOVA)
  Rank rank = Rank::snapkv;
  std::size_t budget = 0, window = 8, kernel = 7, compress_every = 0;
  std::size_t compress_from = 0;  // a text of fewer rows keeps all of them
  bool after_first = false;       // compresses by itself after the first requested compression
  bool average = false;
  bool largest = false;               // of several votes for a row the largest counts, not their mean
  bool weighed = false;               // scores are multiplied by the lengths of the rows' values
  std::size_t draws = 0, future = 1;  // of Rank::expected: latest queries, positions to come
  // for retrieval, together with `budget`
  std::size_t chunk = 8, refresh_every = 0;
  bool min_max = false;
  // for storage; bits 0: not quantised
  std::size_t bits = 0, key_bits = 0, value_bits = 0;  // the latter 0: as `bits`
  std::size_t key_group = 0, value_group = 0, residual = 0;
  bool per_channel = false;
  bool key_hadamard = false, value_hadamard = false;
  bool halves = false;  // codes of 8 bits are stored in halves
  Codebook key_codebook = Codebook::even, value_codebook = Codebook::even;
  double head_scale = 1.0;  // of keys and values, where the codebook has one
  bool kivi = false;
  std::size_t flush_rows = 1;  // rows of keys, and of values, that leave the residual together
  // A compression may move quantised rows into the residual, with their dequantised values.
  bool returns_rows = false;

  /// Bits of the codes of keys or of values.
  [[nodiscard]] std::size_t bits_of(bool key) const {
    const std::size_t own = key ? key_bits : value_bits;
    return own == 0 ? bits : own;
  }
  [[nodiscard]] std::size_t key_rows() const { return !per_channel ? 1 : key_group == 0 ? 32 : key_group; }
  /// Number of latest queries whose attention is needed when rows are dropped.
  [[nodiscard]] std::size_t asked() const {
    if (kind != Kind::budget) return 0;
    return rank == Rank::snapkv ? window : rank == Rank::tova ? 1 : rank == Rank::expected ? draws : 0;
  }
  /// Whether the attention of all calls is summed.
  [[nodiscard]] bool adds_up() const { return kind == Kind::budget && rank == Rank::h2o; }
  /// Whether a cache with such a head refuses rollbacks.
  [[nodiscard]] bool cannot_return() const { return compress_every > 0 || adds_up(); }
};

class HeadModel {
 public:
  explicit HeadModel(const HeadSpec& spec) : spec_{spec} {}

  [[nodiscard]] const HeadSpec& spec() const { return spec_; }
  [[nodiscard]] std::size_t committed() const { return committed_; }

  /// Commits the rows of the text up to `tokens`. Rows leave the residual as others are added.
  void commit(std::size_t tokens) {
    if (committed_ >= tokens) return;
    for (; committed_ < tokens; ++committed_) {
      kept_.push_back(static_cast<std::int64_t>(committed_));
      const bool is_sink = spec_.kind == Kind::window && committed_ < spec_.sinks;
      if (spec_.kind == Kind::window && !is_sink && kept_.size() > spec_.sinks + spec_.recent) {
        kept_.erase(kept_.begin() + static_cast<std::ptrdiff_t>(spec_.sinks));
        ++evicted_;
      }
    }
    quantize();
  }

  /// Positions that the policy holds, ascending.
  [[nodiscard]] const std::vector<std::int64_t>& kept() const { return kept_; }

  [[nodiscard]] bool key_is_quantized(std::int64_t position) const {
    return quantized_keys_.contains(position);
  }
  [[nodiscard]] bool value_is_quantized(std::int64_t position) const {
    return quantized_values_.contains(position);
  }
  /// The rows whose keys share a scale with this row's key: [first, last).
  [[nodiscard]] std::pair<std::int64_t, std::int64_t> key_block(std::int64_t position) const {
    const auto rows = static_cast<std::int64_t>(spec_.key_rows());
    const auto sinks = static_cast<std::int64_t>(spec_.sinks);
    const std::int64_t first = position - (position - sinks) % rows;
    return {first, first + rows};
  }

  /// Whether the query at `t` of a call that begins at `call` reads the row at `p`.
  [[nodiscard]] bool reads(std::int64_t p, std::int64_t t, std::int64_t call, bool selected) const {
    if (p > t) return false;
    switch (spec_.kind) {
      case Kind::full: return true;
      case Kind::window: {
        const auto recent = static_cast<std::int64_t>(spec_.recent);
        if (p < static_cast<std::int64_t>(spec_.sinks)) return true;
        return spec_.prefill_chunk_mask ? p >= call - recent : p > t - recent;
      }
      case Kind::budget:
        return p >= static_cast<std::int64_t>(committed_) || std::ranges::binary_search(kept_, p);
      case Kind::retrieval: {
        if (!selected || selections_.empty()) return true;
        const Selection& now = selections_.back();
        return p >= now.until || now.chunks.contains(p / static_cast<std::int64_t>(spec_.chunk));
      }
    }
    return false;
  }

  // ---- budgets

  [[nodiscard]] bool is_compressible() const {
    return committed_ >= spec_.compress_from && kept_.size() > spec_.budget + spec_.window;
  }
  [[nodiscard]] bool wants_compress() const {
    return spec_.compress_every > 0 && (released_ || !spec_.after_first) &&
           committed_ >= spec_.compress_from &&
           kept_.size() >= spec_.budget + spec_.window + spec_.compress_every;
  }

  /// Computes the score of each candidate from the attention of each observed query of each query head to
  /// each kept row, [heads][queries][kept rows].
  [[nodiscard]] std::vector<double> scores(
      const std::vector<std::vector<std::vector<double>>>& attention) const {
    const std::size_t candidates = kept_.size() - spec_.window;
    const auto width = static_cast<std::ptrdiff_t>(spec_.rank == Rank::snapkv ? spec_.kernel / 2 : 0);
    std::vector<double> total(candidates, 0.0);
    for (const auto& head : attention) {
      std::vector<double> mean(candidates, 0.0);  // or the largest
      for (const auto& query : head) {
        for (std::size_t i = 0; i < candidates; ++i) {
          mean[i] = spec_.largest ? std::max(mean[i], query[i])
                                  : mean[i] + query[i] / static_cast<double>(head.size());
        }
      }
      for (std::size_t i = 0; i < candidates; ++i) {
        double pooled = spec_.average ? 0.0 : -1.0;
        for (std::ptrdiff_t d = -width; d <= width; ++d) {
          const auto at = static_cast<std::ptrdiff_t>(i) + d;
          if (at < 0 || at >= static_cast<std::ptrdiff_t>(candidates)) continue;
          const double near = mean[static_cast<std::size_t>(at)];
          pooled = spec_.average ? pooled + near / static_cast<double>(spec_.kernel) : std::max(pooled, near);
        }
        total[i] = spec_.largest ? std::max(total[i], pooled)
                                 : total[i] + pooled / static_cast<double>(attention.size());
      }
    }
    return total;
  }

  /// Adds a query's attention to a row, one of `group` query heads.
  void pay(std::int64_t position, double share, std::size_t group) {
    double& sum = sums_[position];
    sum = spec_.largest ? std::max(sum, share) : sum + share / static_cast<double>(group);
  }
  /// The score of each candidate by its summed attention.
  [[nodiscard]] std::vector<double> paid() const {
    std::vector<double> scores;
    for (std::size_t i = 0; i + spec_.window < kept_.size(); ++i) {
      const auto found = sums_.find(kept_[i]);
      scores.push_back(found == sums_.end() ? 0.0 : found->second);
    }
    return scores;
  }

  /// The attention of the observed queries to each candidate itself, without its neighbours.
  [[nodiscard]] std::vector<double> votes(
      const std::vector<std::vector<std::vector<double>>>& attention) const {
    std::vector<double> total(kept_.size() - spec_.window, 0.0);
    for (const auto& head : attention) {
      for (const auto& query : head) {
        for (std::size_t i = 0; i < total.size(); ++i) {
          total[i] = spec_.largest
                         ? std::max(total[i], query[i])
                         : total[i] + query[i] / static_cast<double>(head.size() * attention.size());
        }
      }
    }
    return total;
  }

  /// Whether a compression by these scores may leave `survivors`: the window, and the `budget` candidates
  /// with the highest scores; among equal scores those with more votes, then the lower positions. Differences
  /// below `slack` count as equal.
  [[nodiscard]] bool may_survive(const std::vector<std::int64_t>& survivors,
                                 const std::vector<double>& scores, const std::vector<double>& votes,
                                 double slack) const {
    const std::set<std::int64_t> chosen(survivors.begin(), survivors.end());
    if (chosen.size() != survivors.size() || chosen.size() != spec_.budget + spec_.window) return false;
    for (std::size_t i = scores.size(); i < kept_.size(); ++i) {
      if (!chosen.contains(kept_[i])) return false;
    }
    for (std::size_t in = 0; in < scores.size(); ++in) {
      if (!chosen.contains(kept_[in])) continue;
      for (std::size_t out = 0; out < scores.size(); ++out) {
        if (chosen.contains(kept_[out])) continue;
        if (scores[in] < scores[out] - slack) return false;
        if (scores[in] != scores[out]) continue;
        if (votes[in] < votes[out] - slack) return false;
        if (votes[in] == votes[out] && kept_[in] > kept_[out]) return false;
      }
    }
    return std::ranges::all_of(survivors,
                               [&](std::int64_t p) { return std::ranges::binary_search(kept_, p); });
  }

  void compress(const std::vector<std::int64_t>& survivors) {
    kept_ = survivors;
    released_ = true;
    if (spec_.returns_rows) {
      quantized_keys_.clear();
      quantized_values_.clear();
    }
    erase_dead(quantized_keys_);
    erase_dead(quantized_values_);
    quantize();
  }
  /// After a compression that drops nothing, rows leave the residual as others are added; or at once where a
  /// compression moves all rows and so may bring some back to the residual.
  void release() {
    const bool moves = spec_.returns_rows && !released_;
    released_ = true;
    if (moves) quantize();
  }

  // ---- retrieval

  [[nodiscard]] std::int64_t full_chunks() const {
    return static_cast<std::int64_t>(committed_ / spec_.chunk);
  }
  [[nodiscard]] bool selection_is_stale() const {
    if (selections_.empty()) return true;
    return spec_.refresh_every > 0 && committed_ - selections_.back().committed >= spec_.refresh_every;
  }
  /// Rows from this position on are read whatever is selected.
  [[nodiscard]] std::int64_t selected_until() const { return selections_.back().until; }

  /// Whether these chunks are the best ones for queries whose sum gives the chunks these scores.
  [[nodiscard]] bool may_select(const std::set<std::int64_t>& chosen, const std::vector<double>& scores,
                                double slack) const {
    const auto chunks = static_cast<std::size_t>(full_chunks());
    if (chosen.size() != std::min(chunks, spec_.budget / spec_.chunk)) return false;
    if (chunks > 0 && !chosen.contains(0)) return false;
    for (const std::int64_t in : chosen) {
      if (in < 0 || in >= full_chunks()) return false;
      for (std::int64_t out = 1; out < full_chunks() && in > 0; ++out) {
        if (!chosen.contains(out) &&
            scores[static_cast<std::size_t>(in)] < scores[static_cast<std::size_t>(out)] - slack) {
          return false;
        }
      }
    }
    return true;
  }
  /// `tokens`: the length of the text up to and including the selecting query.
  void select(const std::set<std::int64_t>& chunks, std::size_t tokens) {
    selections_.push_back(
        {chunks, full_chunks() * static_cast<std::int64_t>(spec_.chunk), committed_, tokens});
  }
  void truncate(std::size_t tokens) {
    while (!selections_.empty() && selections_.back().tokens > tokens) selections_.pop_back();
  }

 private:
  struct Selection {
    std::set<std::int64_t> chunks;
    std::int64_t until = 0;
    std::size_t committed = 0;
    std::size_t tokens = 0;
  };

  void erase_dead(std::set<std::int64_t>& positions) const {
    std::erase_if(positions, [&](std::int64_t p) { return !std::ranges::binary_search(kept_, p); });
  }

  // Rows leave the residual in the order of their numbers after the sinks, counted from the first row of the
  // text, or after a compression from the first survivor.
  void quantize() {
    if (spec_.bits == 0 || (spec_.kind == Kind::budget && !released_)) return;
    const std::size_t sinks = std::min(spec_.sinks, kept_.size());
    const std::size_t end = evicted_ + kept_.size() - sinks;
    std::size_t beyond = end > spec_.residual ? end - spec_.residual : 0;
    beyond -= beyond % spec_.flush_rows;
    std::size_t keys = beyond;
    if (spec_.kivi) keys = end / spec_.residual * spec_.residual;
    keys -= keys % spec_.key_rows();
    for (std::size_t i = sinks; i < kept_.size(); ++i) {
      const std::size_t number = evicted_ + i - sinks;
      if (number < keys) quantized_keys_.insert(kept_[i]);
      if (number < beyond) quantized_values_.insert(kept_[i]);
    }
    erase_dead(quantized_keys_);
    erase_dead(quantized_values_);
  }

  HeadSpec spec_;
  std::size_t committed_ = 0;
  std::size_t evicted_ = 0;  // number of rows dropped by a window
  std::vector<std::int64_t> kept_;
  std::map<std::int64_t, double> sums_;  // attention as a mean over the query heads, also of dropped rows
  std::set<std::int64_t> quantized_keys_;
  std::set<std::int64_t> quantized_values_;
  bool released_ = false;  // whether it was compressed at least once
  std::vector<Selection> selections_;
};

/// The Hadamard rotation by its matrix: blocks of the largest power of two that divides the channels.
inline std::vector<double> hadamard(const std::vector<double>& row) {
  std::size_t block = 1;
  while (row.size() % (2 * block) == 0) block *= 2;
  const double root = std::sqrt(static_cast<double>(block));
  std::vector<double> rotated(row.size(), 0.0);
  for (std::size_t i = 0; i < row.size(); ++i) {
    const std::size_t first = i - i % block;
    for (std::size_t j = 0; j < block; ++j) {
      const bool odd = std::popcount((i - first) & j) % 2 == 1;
      rotated[i] += (odd ? -row[first + j] : row[first + j]) / root;
    }
  }
  return rotated;
}

/// The largest distance of a number from its quantised value, if these numbers share a scale: half a step,
/// plus the rounding of scale and zero to half precision.
inline double quantization_bound(const std::vector<double>& block, std::size_t bits) {
  const auto [min, max] = std::ranges::minmax(block);
  const auto levels = static_cast<double>((1U << bits) - 1U);
  const auto half_step = [](double x) { return std::max(std::abs(x) * 0x1p-10, 0x1p-24); };
  const double scale = (max - min + half_step(min)) / levels;
  return 0.5 * (scale + half_step(scale)) + 1e-5 * std::max({std::abs(min), std::abs(max), 1e-3});
}

/// The share of a block's squares that normal numbers of so many bits may lose, of any block: a fitted scale leaves
/// least of numbers that lie between two of the table, and twice what Max (1960) says of normal ones is rare.
inline double normal_loss(std::size_t bits) { return bits == 2 ? 0.3 : bits == 3 ? 0.12 : 0.05; }

/// How far a number of the block may be from what a codebook makes of it, but for normal numbers, of which single ones
/// say little (`normal_loss`).
inline double codebook_bound(const std::vector<double>& block, double number, Codebook codebook,
                             double head_scale) {
  double largest = 0.0;
  for (const double one : block) largest = std::max(largest, std::abs(one));
  switch (codebook) {
    // The sixteenth of its binade's width, or of the least steps; more where it is beyond the largest.
    case Codebook::fp8:
      return std::max(std::max(std::abs(number) / 16, head_scale * 0x1p-10),
                      std::abs(number) - 448 * head_scale) *
             1.001;
    // Half of the step between 4 and 6, or what lies beyond 6, of a scale that is a quarter of the largest at most.
    case Codebook::mxfp4: return 0.5 * largest;
    // The same of a scale that is a sixth, off by a sixteenth itself, or by its own least step.
    default: return std::max(0.2 * largest, 6 * head_scale * 0x1p-9);
  }
}

}  // namespace oracle
