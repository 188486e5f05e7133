// SPDX-License-Identifier: Apache-2.0
//
// Texts whose rows follow from their tokens, as a model's would, and a reader of them that stops at marks. What a
// PrefixCache returns is compared with a cache that has read the same text from its beginning.
#pragma once

#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <span>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvpolicy/cache/prefix_cache.hpp>

#include "cache/dump.hpp"
#include "support/tensors.hpp"

namespace test {

/// Tokens, and a number for each prefix of them that decides everything about its last token.
class Text {
 public:
  void add(std::int32_t token) {
    std::uint64_t next = state(tokens_.size()) + 0x9E3779B97F4A7C15U * static_cast<std::uint64_t>(token + 1);
    next = (next ^ (next >> 30)) * 0xBF58476D1CE4E5B9U;
    next = (next ^ (next >> 27)) * 0x94D049BB133111EBU;
    tokens_.push_back(token);
    states_.push_back(next ^ (next >> 31));
  }
  void cut(std::size_t size) {
    tokens_.resize(size);
    states_.resize(size);
  }
  [[nodiscard]] std::span<const std::int32_t> tokens() const { return tokens_; }
  [[nodiscard]] std::size_t size() const { return tokens_.size(); }
  /// Of the first `count` tokens.
  [[nodiscard]] std::uint64_t state(std::size_t count) const { return count == 0 ? 1 : states_[count - 1]; }
  /// Whether readers stop after `count` tokens.
  [[nodiscard]] bool is_mark(std::size_t count) const { return count > 0 && state(count) % 5 == 0; }

 private:
  std::vector<std::int32_t> tokens_;
  std::vector<std::uint64_t> states_;
};

/// Reads the tokens [from, to) through all layers and stops at each mark, where it calls at_mark(tokens read). Returns
/// the outputs of the tokens from `shown` on, of all layers.
template <class Cache, class AtMark>
std::vector<float> read_text(Cache& cache, const Text& text, std::size_t from, std::size_t to,
                             std::size_t shown, AtMark at_mark) {
  const kvpolicy::ModelShape shape = cache.plan().shape();
  std::vector<float> said;
  while (from < to) {
    std::size_t end = from + 1;
    while (end < to && !text.is_mark(end)) ++end;
    for (std::size_t layer = 0; layer < shape.layers; ++layer) {
      Tensor<float> q{end - from, shape.q_heads, shape.head_dim};
      Tensor<float> k{end - from, shape.kv_heads, shape.head_dim};
      Tensor<float> v{end - from, shape.kv_heads, shape.head_dim};
      Tensor<float> out{end - from, shape.q_heads, shape.head_dim};
      const auto fill = [&](Tensor<float>& tensor, std::uint64_t salt) {
        tensor.fill([&](std::size_t token, std::size_t head, std::size_t channel) {
          std::uint64_t x = text.state(from + token + 1) + (salt + 7 * layer) * 0x2545F4914F6CDD1DU +
                            (head * 1024 + channel) * 0xD6E8FEB86659FD93U;
          x = (x ^ (x >> 32)) * 0xD6E8FEB86659FD93U;
          x ^= x >> 29;
          // As the cache keeps them: then a call's own rows and older ones read alike, wherever calls end.
          using Kept = typename Cache::element_type;
          const float number = static_cast<float>(static_cast<std::int64_t>(x >> 40) - (1 << 23)) * 0x1p-22F;
          return static_cast<float>(Kept{number});
        });
      };
      fill(q, 1);
      fill(k, 2);
      fill(v, 3);
      kvpolicy::AttendOptions options{.scores_rows = true};
      if (text.state(end) % 2 == 0) options.read = kvpolicy::Read::selected;
      cache.step(layer, std::as_const(q).view(), std::as_const(k).view(), std::as_const(v).view(), out.view(),
                 options);
      for (std::size_t token = std::max(from, shown); token < end; ++token) {
        for (std::size_t head = 0; head < shape.q_heads; ++head) {
          const auto row = out.row(token - from, head);
          said.insert(said.end(), row.begin(), row.end());
        }
      }
    }
    from = end;
    if (text.is_mark(end)) at_mark(end);
  }
  return said;
}

/// What was asked of a PrefixCache, besides what it counts itself.
struct PrefixCounts {
  std::size_t keeps = 0;   ///< calls of `keep`
  std::size_t evicts = 0;  ///< calls of `evict`
  std::size_t clears = 0;
};

/// Random requests to one PrefixCache under a few plans, each compared with a cold run.
template <kvpolicy::Element E, class Engine = kvpolicy::ScalarEngine>
class RandomPrefixes {
 public:
  using Cache = kvpolicy::KvCache<E, Engine>;
  using Prefixes = kvpolicy::PrefixCache<E, Engine>;

  RandomPrefixes(std::uint64_t seed, std::vector<kvpolicy::HeadPlan<E>> plans,
                 const kvpolicy::CacheOptions& options, std::size_t longest, std::size_t max_bytes = 0)
      : random_{seed},
        plans_{std::move(plans)},
        options_{options},
        longest_{longest},
        prefixes_{options, {.max_bytes = max_bytes}},
        max_bytes_{max_bytes} {}

  [[nodiscard]] Prefixes& prefixes() { return prefixes_; }
  [[nodiscard]] const PrefixCounts& counts() const { return counts_; }

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      CAPTURE(i);
      const std::size_t what = below(random_, 12);
      if (what == 0) {
        const std::size_t before = prefixes_.statistics().bytes;
        const std::size_t freed = prefixes_.evict(1 + below(random_, before / 2 + 1));
        CHECK(freed <= before);
        ++counts_.evicts;
      } else if (what == 1 && below(random_, 8) == 0) {
        prefixes_.clear();
        CHECK(prefixes_.statistics().bytes == 0);
        ++counts_.clears;
      } else {
        ask();
      }
      if (max_bytes_ > 0) CHECK(prefixes_.statistics().bytes <= max_bytes_);
    }
  }

 private:
  // A text that begins like an earlier one, perhaps.
  [[nodiscard]] Text draw() {
    Text text;
    if (!texts_.empty() && below(random_, 5) > 0) {
      text = texts_[below(random_, texts_.size())];
      text.cut(text.size() - below(random_, text.size() / 2 + 1));
    }
    const std::size_t size = std::min(longest_, text.size() + 1 + below(random_, longest_ / 2));
    if (text.size() >= size) text.cut(size - 1);
    while (text.size() < size) text.add(static_cast<std::int32_t>(below(random_, 3)));
    if (texts_.size() < 20) {
      texts_.push_back(text);
    } else {
      texts_[below(random_, texts_.size())] = text;
    }
    return text;
  }

  void ask() {
    const Text text = draw();
    const auto& plan = plans_[below(random_, plans_.size())];
    auto found = prefixes_.find(plan, text.tokens().first(text.size() - 1));
    const std::size_t from = found ? found->tokens : 0;
    CAPTURE(from);
    CAPTURE(text.size());
    Cache warm = found ? std::move(found->cache) : Cache{plan, options_};
    REQUIRE(warm.tokens() == from);
    const std::size_t committed = warm.commit_point();
    const auto said = read_text(warm, text, from, text.size(), from, [&](std::size_t tokens) {
      if (below(random_, 4) == 0) return;
      static_cast<void>(prefixes_.keep(warm, text.tokens().first(tokens)));
      ++counts_.keeps;
    });
    Cache cold{plan, options_};
    const auto read_cold = [&](std::size_t to) {
      return read_text(cold, text, cold.tokens(), to, from, [](std::size_t) {});
    };
    // Where a call begins decides what an engine for vectors adds up first; the plain one adds row after row.
    if (!std::is_same_v<Engine, kvpolicy::ScalarEngine>) static_cast<void>(read_cold(from));
    // A fork up to a page boundary has committed every row; others keep those that may be taken back.
    if (options_.max_rollback > 0 && from > 0 && committed == from) {
      static_cast<void>(read_cold(from));
      cold.commit();
    }
    const auto expected = read_cold(text.size());
    REQUIRE(same_bits(said, expected));
    const std::size_t tentative = warm.tokens() - warm.commit_point();
    if (const std::size_t what = below(random_, 4); what == 0) {
      warm.compress();
      cold.compress();
    } else if (what == 1) {
      const std::size_t to = warm.tokens() - below(random_, tentative + 1);
      warm.truncate(to);
      cold.truncate(to);
    }
    REQUIRE(dump(warm) == dump(cold));
  }

  Random random_;
  std::vector<kvpolicy::HeadPlan<E>> plans_;
  kvpolicy::CacheOptions options_;
  std::size_t longest_;
  Prefixes prefixes_;
  std::size_t max_bytes_;
  std::vector<Text> texts_;
  PrefixCounts counts_;
};

}  // namespace test
