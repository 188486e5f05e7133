// SPDX-License-Identifier: Apache-2.0
//
// A LanguageModel that is a table: its logits depend on the latest two tokens of the path that a query
// sees, and on whether it reads all rows or selected ones. It is so small that all its outputs can be
// enumerated.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <new>
#include <optional>
#include <span>
#include <stdexcept>
#include <utility>
#include <vector>

#include <kvpolicy/speculation/language_model.hpp>

#include "table_cache.hpp"

namespace test {

/// A fault at one of a model's calls: which fault, and at which call among those that read in the same
/// way.
struct Fault {
  enum class Kind { nan, infinite, throws_before, throws_half_way, no_memory, too_few_logits };
  Kind kind = Kind::nan;
  std::size_t call = 0;
  kvpolicy::Read read = kvpolicy::Read::all;
};

/// What a test may need to know about a call.
struct CallRecord {
  kvpolicy::Read read;
  std::size_t seen;  // tokens in the cache before the call
  std::size_t tokens;
  bool tree;
  bool refresh_selection;
  std::optional<std::size_t> selection_query;
};

class TableModel {
 public:
  /// `spread` scales the logits: a larger one makes the model more certain. `selected` is how far a
  /// read of selected rows differs from one of all rows.
  TableModel(std::size_t vocabulary, std::uint64_t seed, float spread = 1.5F, float selected = 0.7F)
      : vocabulary_{vocabulary},
        all_((vocabulary + 1) * vocabulary * vocabulary),
        selected_(all_.size()),
        stale_(all_.size()) {
    for (std::size_t i = 0; i < all_.size(); ++i) {
      all_[i] = spread * noise(seed, i);
      selected_[i] = all_[i] + selected * noise(seed + 1, i);
      stale_[i] = spread * noise(seed + 2, i);
    }
  }
  /// Another model whose logits over all rows are similar to this one's.
  [[nodiscard]] TableModel like(std::uint64_t seed, float distance) const {
    TableModel other = *this;
    for (std::size_t i = 0; i < all_.size(); ++i) {
      other.all_[i] = other.selected_[i] = all_[i] + distance * noise(seed, i);
    }
    return other;
  }

  [[nodiscard]] std::size_t vocabulary() const { return vocabulary_; }

  std::vector<float> read(TableCache& cache, const kvpolicy::ModelCall& call) {
    const auto& [tokens, wanted, attend] = call;
    if (records != nullptr) {
      records->push_back({attend.read, cache.tokens(), tokens.size(), attend.tree != nullptr,
                          attend.refresh_selection, attend.selection_query});
    }
    for (const int token : tokens) {
      rule(token >= 0 && static_cast<std::size_t>(token) < vocabulary_, "a token of no vocabulary");
    }
    const bool selected = attend.read == kvpolicy::Read::selected;
    const bool fails = fault && fault->read == attend.read && fault->call == calls_[selected];
    ++calls_[selected];
    if (fails && fault->kind == Fault::Kind::throws_before) throw std::runtime_error("no engine");
    cache.append(tokens, attend);
    if (fails && fault->kind == Fault::Kind::throws_half_way) {
      cache.tear(tokens.size());
      throw std::runtime_error("engine stopped");
    }
    if (fails && fault->kind == Fault::Kind::no_memory) {
      cache.tear(tokens.size());
      throw std::bad_alloc{};
    }
    const std::size_t end = cache.tokens();
    const std::size_t count = wanted == kvpolicy::LogitsOf::all    ? tokens.size()
                              : wanted == kvpolicy::LogitsOf::last ? 1
                                                                   : 0;
    const bool stale = selected && fresh_for > 0 && end > cache.chosen_at() + fresh_for;
    const std::vector<float>& table = !selected ? all_ : stale ? stale_ : selected_;
    std::vector<float> logits;
    logits.reserve(count * vocabulary_);
    for (std::size_t row = end - count; row < end; ++row) {
      const auto [before, own] = cache.latest_two(row, static_cast<int>(vocabulary_));
      const auto at = table.begin() + static_cast<std::ptrdiff_t>(row_start(before, own));
      logits.insert(logits.end(), at, at + static_cast<std::ptrdiff_t>(vocabulary_));
    }
    if (fails && fault->kind == Fault::Kind::too_few_logits) logits.resize(logits.size() / 2);
    if (fails && fault->kind == Fault::Kind::nan) {
      std::ranges::fill(logits, std::numeric_limits<float>::quiet_NaN());
    }
    if (fails && fault->kind == Fault::Kind::infinite) {
      std::ranges::fill(logits, std::numeric_limits<float>::infinity());
    }
    return logits;
  }

  /// The logits after the tokens `before, own`; `vocabulary()` stands for no token before.
  [[nodiscard]] std::span<const float> logits(int before, int own,
                                              kvpolicy::Read read = kvpolicy::Read::all) const {
    const auto& table = read == kvpolicy::Read::all ? all_ : selected_;
    return std::span{table}.subspan(row_start(before, own), vocabulary_);
  }

  [[nodiscard]] std::size_t calls(kvpolicy::Read read = kvpolicy::Read::all) const {
    return calls_[read == kvpolicy::Read::selected];
  }

  std::optional<Fault> fault;
  std::vector<CallRecord>* records = nullptr;
  /// From so many tokens after the selection on, selected reads give very different logits; 0: never.
  std::size_t fresh_for = 0;

 private:
  // Uniform numbers in [-1, 1), by splitmix64.
  [[nodiscard]] static float noise(std::uint64_t seed, std::uint64_t i) {
    std::uint64_t x = (seed * 0x100000001b3ULL + i + 1) * 0x9e3779b97f4a7c15ULL;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
    return static_cast<float>(static_cast<double>((x ^ (x >> 31)) >> 11) * 0x1p-52 - 1.0);
  }
  [[nodiscard]] std::size_t row_start(int before, int own) const {
    return (static_cast<std::size_t>(before) * vocabulary_ + static_cast<std::size_t>(own)) * vocabulary_;
  }

  std::size_t vocabulary_;
  std::vector<float> all_;  // [vocabulary + 1, vocabulary, vocabulary]
  std::vector<float> selected_;
  std::vector<float> stale_;
  std::size_t calls_[2] = {0, 0};
};

static_assert(kvpolicy::TentativeCache<TableCache>);
static_assert(kvpolicy::LanguageModel<TableModel, TableCache>);

}  // namespace test
