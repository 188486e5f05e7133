// SPDX-License-Identifier: Apache-2.0
//
// Sequences in pairs: one cache of each is called alone, the other in a batch with all the others. Whatever
// happens to them, both must hold the same rows and say the same, bit for bit.
#pragma once

#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/batch.hpp>
#include <kvpolicy/core/token_tree.hpp>

#include "cache/dump.hpp"
#include "cache/random_operations.hpp"
#include "support/compare.hpp"
#include "support/plans.hpp"
#include "support/random_tree.hpp"
#include "support/tensors.hpp"

namespace test {

/// One sequence, twice.
template <class Cache>
struct Twins {
  Cache alone;
  Cache batched;
  std::size_t max_append = 0;
  std::size_t max_rollback = 0;
  kvpolicy::TokenTree tree = {};  // pending in both

  void check() const { REQUIRE(dump(alone) == dump(batched)); }
};

/// What a sequence does in one call of a batch.
struct TwinCall {
  std::size_t tokens = 0;
  kvpolicy::AttendOptions options = {};
};

/// What happened to all sequences.
struct TwinCounts {
  std::size_t batches = 0;     ///< calls of all layers that bring a token at least
  std::size_t sequences = 0;   ///< in them, with a token at least
  std::size_t tokens = 0;      ///< in them
  std::size_t tree_calls = 0;  ///< sequences in them whose tokens are nodes of a tree
  std::size_t joins = 0, forks = 0, leaves = 0;
  std::size_t rollbacks = 0;  ///< that took a token back at least
  std::size_t accepts = 0, commits = 0, compressions = 0;
};

/// A ragged tensor's tokens of one sequence.
template <class T>
kvpolicy::TensorView<const T> part_of(const Tensor<T>& tensor, std::span<const std::int32_t> indptr,
                                      std::size_t i) {
  return tensor.view().slice(static_cast<std::size_t>(indptr[i]),
                             static_cast<std::size_t>(indptr[i + 1] - indptr[i]));
}

/// Random operations on a changing set of sequences of one shape.
template <kvpolicy::Element E, class Engine>
class BatchOfTwins {
 public:
  using Cache = kvpolicy::KvCache<E, Engine>;
  using Batch = kvpolicy::Batch<E, Engine>;

  BatchOfTwins(std::uint64_t seed, const kvpolicy::ModelShape& shape, Engine engine = {})
      : random_{seed}, shape_{shape}, engine_{engine}, batch_{std::move(engine)} {}

  [[nodiscard]] const TwinCounts& counts() const { return counts_; }

  void run(std::size_t operations) {
    for (std::size_t i = 0; i < operations; ++i) {
      CAPTURE(i);
      const std::size_t what = below(random_, 16);
      if (twins_.empty() || (what == 0 && twins_.size() < 6)) {
        join();
      } else if (what == 1) {
        twins_.erase(some());
        ++counts_.leaves;
      } else if (what == 2) {
        fork();
      } else if (what < 6) {
        change(**some());
      } else {
        call();
      }
    }
    for (const auto& one : twins_) one->check();
  }

 private:
  using OneOfTwins = std::unique_ptr<Twins<Cache>>;

  [[nodiscard]] typename std::vector<OneOfTwins>::iterator some() {
    return twins_.begin() + static_cast<std::ptrdiff_t>(below(random_, twins_.size()));
  }

  void join() {
    kvpolicy::CacheOptions options;
    options.max_rollback = one_of(random_, std::vector<std::size_t>{0, 1, 5, 33});
    options.max_append = 1 + below(random_, 40);
    options.page_rows = below(random_, 2) == 0 ? 16 : 64;
    auto heads = some_heads(below(random_, 40), shape_.kv_head_count(), options.max_rollback == 0);
    if (options.max_rollback == 0 && below(random_, 3) == 0) {
      heads.back() = {.kind = Kind::budget, .rank = Rank::h2o, .budget = 20, .window = 4};
    }
    const auto plan = plan_of<E>(shape_, heads);
    twins_.push_back(OneOfTwins{new Twins<Cache>{Cache{plan, options, engine_}, Cache{plan, options, engine_},
                                                 options.max_append, options.max_rollback}});
    ++counts_.joins;
  }
  void fork() {
    const Twins<Cache>& from = **some();
    twins_.push_back(OneOfTwins{new Twins<Cache>{from.alone.fork(), from.batched.fork(), from.max_append,
                                                 from.max_rollback, from.tree}});
    ++counts_.forks;
  }

  // What concerns one sequence alone.
  void change(Twins<Cache>& one) {
    const auto both = [&](auto act) {
      act(one.alone);
      act(one.batched);
    };
    if (!one.tree.empty()) {
      const auto path = random_path(random_, one.tree);
      both([&](Cache& cache) { cache.accept(path); });
      one.tree = {};
      ++counts_.accepts;
    } else if (const std::size_t what = below(random_, 3); what == 0) {
      const std::size_t tentative = one.alone.tokens() - one.alone.commit_point();
      const std::size_t tokens = one.alone.tokens() - below(random_, tentative + 1);
      if (tokens < one.alone.tokens()) ++counts_.rollbacks;
      both([&](Cache& cache) { cache.truncate(tokens); });
    } else if (what == 1) {
      both([](Cache& cache) { cache.commit(); });
      ++counts_.commits;
    } else {
      both([](Cache& cache) { cache.compress(); });
      ++counts_.compressions;
    }
    one.check();
  }

  // One call of all layers for some of the sequences, in a random order.
  void call() {
    std::vector<Twins<Cache>*> called;
    for (const auto& one : twins_) {
      if (below(random_, 4) > 0)
        called.insert(called.begin() + static_cast<std::ptrdiff_t>(below(random_, called.size() + 1)),
                      one.get());
    }
    const bool apart = below(random_, 3) == 0;
    std::vector<TwinCall> calls(called.size());
    std::vector<kvpolicy::TokenTree> trees(called.size());
    std::vector<std::int32_t> indptr{0};
    for (std::size_t i = 0; i < called.size(); ++i) {
      draw(*called[i], apart, calls[i], trees[i]);
      indptr.push_back(indptr.back() + static_cast<std::int32_t>(calls[i].tokens));
    }
    for (std::size_t layer = 0; layer < shape_.layers; ++layer)
      layer_call(layer, called, calls, indptr, apart);
    for (std::size_t i = 0; i < called.size(); ++i) {
      if (calls[i].options.tree != nullptr) called[i]->tree = trees[i];
      called[i]->check();
      if (calls[i].tokens == 0) continue;
      ++counts_.sequences;
      if (calls[i].options.tree != nullptr) ++counts_.tree_calls;
    }
    counts_.tokens += static_cast<std::size_t>(indptr.back());
    if (indptr.back() > 0) ++counts_.batches;
  }

  void draw(const Twins<Cache>& one, bool apart, TwinCall& call, kvpolicy::TokenTree& tree) {
    call.tokens = one_of(random_, std::vector<std::size_t>{0, 1, 1, 1, 1, 2, 3, 7, 17, 40, 129});
    if (apart) call.tokens = std::min(call.tokens, one.max_append);
    call.options.read = below(random_, 2) == 0 ? Read::selected : Read::all;
    call.options.refresh_selection = below(random_, 4) == 0;
    if (below(random_, 3) == 0) call.options.scale = 0.2F;
    if (below(random_, 3) == 0) call.options.softcap = 5.0F;
    const std::size_t room = one.max_rollback - std::min(one.max_rollback, one.tree.size());
    if (!one.tree.empty() || (one.max_rollback > 0 && below(random_, 4) == 0)) {
      // A tree that is pending takes no other call.
      call.tokens = std::min(call.tokens, room);
      tree = grown(random_, one.tree, call.tokens);
      call.options.tree = &tree;
      call.options.refresh_selection = false;
    }
    if (call.options.tree == nullptr && call.tokens > 0 && below(random_, 3) == 0) {
      call.options.selection_query = below(random_, call.tokens);
    }
  }

  void layer_call(std::size_t layer, const std::vector<Twins<Cache>*>& called,
                  const std::vector<TwinCall>& calls, std::span<const std::int32_t> indptr, bool apart) {
    const Layout layout = below(random_, 2) == 0 ? Layout::contiguous : Layout::heads_first;
    Chunk<E> ragged{random_, shape_, static_cast<std::size_t>(indptr.back()), layout};
    const Chunk<E>& given = ragged;
    Tensor<float> expected{given.q.tokens(), shape_.q_heads, shape_.head_dim, layout};
    std::vector<float> lse(ragged.log_sum_exp.size(), -1.0F);
    std::vector<kvpolicy::BatchSequence<Cache>> sequences;
    for (std::size_t i = 0; i < called.size(); ++i) {
      const auto first = static_cast<std::size_t>(indptr[i]) * shape_.q_heads;
      const std::size_t places = calls[i].tokens * shape_.q_heads;
      kvpolicy::AttendOptions options = calls[i].options;
      options.log_sum_exp = std::span{ragged.log_sum_exp}.subspan(first, places);
      sequences.push_back({&called[i]->batched, options});
      options.log_sum_exp = std::span{lse}.subspan(first, places);
      const auto q = part_of(given.q, indptr, i), k = part_of(given.k, indptr, i),
                 v = part_of(given.v, indptr, i);
      const auto out = expected.view().slice(static_cast<std::size_t>(indptr[i]), calls[i].tokens);
      if (apart) {
        called[i]->alone.append(layer, k, v, options);
        called[i]->alone.attend(layer, q, out, options);
      } else {
        called[i]->alone.step(layer, q, k, v, out, options);
      }
    }
    if (apart) {
      CHECK(batch_.append(layer, sequences, indptr, given.k.view(), given.v.view()).empty());
      CHECK(batch_.attend(layer, sequences, indptr, given.q.view(), ragged.out.view()).empty());
    } else {
      CHECK(batch_
                .step(layer, sequences, indptr, given.q.view(), given.k.view(), given.v.view(),
                      ragged.out.view())
                .empty());
    }
    REQUIRE(same_bits(ragged.out.numbers(), expected.numbers()));
    REQUIRE(same_bits(ragged.log_sum_exp, lse));
    CHECK(ragged.out.guards_intact());
  }

  Random random_;
  kvpolicy::ModelShape shape_;
  Engine engine_;
  Batch batch_;
  std::vector<OneOfTwins> twins_;
  TwinCounts counts_;
};

}  // namespace test
