// SPDX-License-Identifier: Apache-2.0
//
// Two caches get the same calls, and one of them is saved and loaded in between: there must be no
// visible difference between them.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <memory_resource>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/kvpolicy.hpp>

#include "cache/dump.hpp"
#include "support/random_saved_plan.hpp"
#include "support/random_tree.hpp"
#include "support/small_cache.hpp"

namespace test {

using kvpolicy::CacheOptions;
using kvpolicy::ModelShape;
using kvpolicy::Read;

template <kvpolicy::Element E>
class Twins {
 public:
  using Cache = kvpolicy::KvCache<E>;

  Twins(const kvpolicy::HeadPlan<E>& plan, const CacheOptions& options)
      : shape_{plan.shape()}, untouched_{plan, options}, saved_{plan, options} {}

  Cache& untouched() { return untouched_; }
  Cache& saved_one() { return saved_; }
  [[nodiscard]] std::size_t uncommitted() const { return untouched_.tokens() - untouched_.commit_point(); }

  /// Saves one cache and replaces it by a new cache with `options` that loads the file.
  void reload(const CacheOptions& options) {
    const std::string bytes = saved(saved_);
    Cache loaded{untouched_.plan(), options};
    load_bytes(loaded, bytes);
    // A tail of another length has room for another number of queries.
    const bool same_tail = options.tail_rows() == saved_.options().tail_rows();
    CHECK((!same_tail || saved(loaded) == bytes));
    saved_ = std::move(loaded);
  }

  /// Moves one cache to another pool and back.
  void swap(kvpolicy::PagePool& to) {
    const auto expected = dump(saved_);
    const std::size_t fast = saved_.bytes() - saved_.slow_bytes();
    kvpolicy::SwappedCache waiting{std::move(saved_), to};
    CHECK(waiting.fast_bytes() == fast);
    CHECK(to.live_bytes() == waiting.bytes());
    CHECK(waiting.tokens() == untouched_.tokens());
    saved_ = waiting.swap_in();
    CHECK(to.live_bytes() == 0);
    CHECK(dump(saved_) == expected);
  }

  /// Feeds the same tokens through all layers of both caches.
  void run(Random& random, std::size_t tokens, bool apart, kvpolicy::AttendOptions options) {
    options.scores_rows = true;
    for (std::size_t l = 0; l < shape_.layers; ++l) {
      Chunk<float> one{random, shape_, tokens};
      Chunk<float> other = one;
      if (apart) {
        one.append(untouched_, l, options);
        other.append(saved_, l, options);
        one.attend(untouched_, l, options);
        other.attend(saved_, l, options);
      } else {
        one.step(untouched_, l, options);
        other.step(saved_, l, options);
      }
      bool same = true;
      for (std::size_t token = 0; token < tokens; ++token) {
        for (std::size_t head = 0; head < shape_.q_heads; ++head) {
          same = same && same_bits(one.out.row(token, head), other.out.row(token, head));
        }
      }
      CHECK(same);
      CHECK(same_bits(one.log_sum_exp, other.log_sum_exp));
    }
  }

  /// Makes the same call on both caches; both may throw.
  template <class Act>
  void both(Act act) {
    const std::string one = thrown<kvpolicy::Error>([&] { act(untouched_); });
    CHECK(one == thrown<kvpolicy::Error>([&] { act(saved_); }));
  }

  void check(bool with_bytes) {
    CHECK(dump(untouched_, with_bytes) == dump(saved_, with_bytes));
    CHECK(untouched_.observed_rows() == saved_.observed_rows());
  }

 private:
  ModelShape shape_;
  Cache untouched_;
  Cache saved_;
};

struct RandomRun {
  ModelShape shape;
  CacheOptions options;
  bool other_options = false;                // the loaded cache has another page size, and slow memory or not
  kvpolicy::PagePool* swapped_to = nullptr;  // where a cache waits, instead of being saved
};

template <kvpolicy::Element E>
void random_twins(std::uint64_t seed, const kvpolicy::HeadPlan<E>& plan, const RandomRun& run,
                  std::size_t operations) {
  CAPTURE(seed);
  Random random{seed};
  const CacheOptions& options = run.options;
  std::pmr::unsynchronized_pool_resource elsewhere;
  Twins<E> twins{plan, options};
  for (std::size_t i = 0; i < operations; ++i) {
    CAPTURE(i);
    const std::size_t what = below(random, 32);
    if (what < 4 && twins.uncommitted() > 0) {
      const std::size_t to = twins.untouched().tokens() - below(random, twins.uncommitted() + 1);
      twins.both([&](auto& cache) { cache.truncate(to); });
    } else if (what == 4) {
      twins.both([](auto& cache) { cache.commit(); });
    } else if (what < 7) {
      twins.both([](auto& cache) { cache.compress(); });
    } else if (what == 7) {
      const std::size_t layer = below(random, run.shape.layers);
      twins.both([&](auto& cache) { cache.compress(layer); });
    } else if (what == 8) {
      twins.saved_one() = twins.saved_one().fork();
    } else if (what < 15 && run.swapped_to != nullptr) {
      twins.swap(*run.swapped_to);
    } else if (what < 15) {
      CacheOptions other = options;
      if (run.other_options) {
        other.page_rows = std::size_t{32} << below(random, 3);
        other.slow_memory = below(random, 2) == 0 ? nullptr : &elsewhere;
        other.max_append += below(random, 5);
      }
      twins.reload(other);
    } else if (what < 18 && options.max_rollback > 0) {
      const auto tree = random_tree(random, 1 + below(random, options.max_rollback));
      kvpolicy::AttendOptions call;
      call.tree = &tree;
      twins.run(random, tree.size(), false, call);
      const auto path = random_path(random, tree);
      twins.both([&](auto& cache) { cache.accept(path); });
    } else {
      kvpolicy::AttendOptions call;
      call.read = below(random, 2) == 0 ? Read::selected : Read::all;
      call.refresh_selection = below(random, 4) == 0;
      if (i % 3 == 0) call.softcap = 3.0F;
      const bool apart = below(random, 4) == 0;
      const std::size_t most = apart ? options.max_append : below(random, 3) == 0 ? 90 : 12;
      twins.run(random, 1 + below(random, most), apart, call);
    }
    twins.check(!run.other_options);
  }
}

}  // namespace test
