// SPDX-License-Identifier: Apache-2.0
//
// One step for many sequences, each with its own cache, plan, number of new tokens and options. A part of a prompt,
// decoding sequences and trees of draft tokens may be mixed. The attention of all sequences is one call of the
// engine, so there is one parallel region; only sequences that are read with a bound (Read::bounded) have calls
// of their own.
//
// Tensors are ragged, as in FlashInfer and vLLM: the tokens of all sequences one after another, and `indptr`, which
// says where the tokens of each sequence begin.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <exception>
#include <new>
#include <span>
#include <utility>
#include <vector>

#include <kvpolicy/cache/batch_call.hpp>
#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/cache/layer_calls.hpp>
#include <kvpolicy/core/attention.hpp>
#include <kvpolicy/core/bounded_attention.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/tensor_view.hpp>

namespace kvpolicy {

/// Calls of many sequences. Each sequence gets the same bits as from calls of its own KvCache with an engine of as
/// many threads. A mistake of the caller (a shape, an option, a pending tree) throws what KvCache throws, with the
/// number of the sequence in the message, and leaves all sequences as they were before the call. So does what the
/// engine throws, as an Error if its type is not the library's; `out` may hold anything then. If memory for one
/// sequence cannot be obtained, that sequence is left out of the call and the others are served.
///
/// A sequence that was left out of one layer has fewer tokens there. Leave it out of the following layers too, and
/// `truncate` it to its former length before its next step.
///
/// Not synchronised. The caches of one call must differ, and nobody else may use them during the call. The batch's
/// engine computes the attention; selections, sums and compressions use the engine of each cache.
template <Element E, AttentionEngine Engine = ScalarEngine>
class Batch {
 public:
  using Cache = KvCache<E, Engine>;
  using Sequence = BatchSequence<Cache>;

  explicit Batch(Engine engine = {}) : engine_{std::move(engine)} {}

  [[nodiscard]] Engine& engine() { return engine_; }

  /// KvCache::step for every sequence. Sequence i has the tokens [indptr[i], indptr[i + 1]) of all tensors; the range
  /// may be empty. Returns the sequences that were left out, in ascending order; the span is valid until the next
  /// call.
  /// @throws ShapeError for an indptr that does not fit, ConfigError for a cache that is missing or listed
  /// twice, and as KvCache::step; what the engine throws
  template <class Q, class K, class V, class Out>
  std::span<const LeftOut> step(std::size_t layer, std::span<const Sequence> sequences,
                                std::span<const std::int32_t> indptr, const TensorView<Q>& q,
                                const TensorView<K>& k, const TensorView<V>& v, const TensorView<Out>& out) {
    return step(layer, sequences, indptr, ConstTensor{q}, ConstTensor{k}, ConstTensor{v}, MutableTensor{out});
  }
  /// The same for tensors whose element types are known only at run time.
  std::span<const LeftOut> step(std::size_t layer, std::span<const Sequence> sequences,
                                std::span<const std::int32_t> indptr, const ConstTensor& q,
                                const ConstTensor& k, const ConstTensor& v, const MutableTensor& out) {
    check("step", sequences, indptr, q);
    detail::check_whole("k", k, q.tokens);
    detail::check_whole("v", v, q.tokens);
    detail::check_whole("out", out, q.tokens);
    check_written_once(out);
    const auto tensors = [&](std::size_t i) {
      return detail::StepTensors{detail::part_of(q, indptr, i), detail::part_of(k, indptr, i),
                                 detail::part_of(v, indptr, i), detail::part_of(out, indptr, i)};
    };
    begin(sequences, [&](std::size_t i, Pending& call) {
      Cache& cache = *sequences[i].cache;
      call.layer = &cache.own_layer(layer);
      call.options = cache.completed(sequences[i].options, layer);
      call.attention = cache.calls_.begin_step(*call.layer, tensors(i), call.options, cache.options_);
      return call.attention.queries.tokens > 0;
    });
    attend_pending(sequences);
    return end([&](const Pending& call) {
      Cache& cache = *sequences[call.sequence].cache;
      cache.calls_.end_step(*call.layer, tensors(call.sequence), call.options, cache.options_);
    });
  }

  /// The two halves of `step`, as KvCache::append and KvCache::attend.
  /// @throws as `step`
  template <class K, class V>
  std::span<const LeftOut> append(std::size_t layer, std::span<const Sequence> sequences,
                                  std::span<const std::int32_t> indptr, const TensorView<K>& k,
                                  const TensorView<V>& v) {
    return append(layer, sequences, indptr, ConstTensor{k}, ConstTensor{v});
  }
  std::span<const LeftOut> append(std::size_t layer, std::span<const Sequence> sequences,
                                  std::span<const std::int32_t> indptr, const ConstTensor& k,
                                  const ConstTensor& v) {
    check("append", sequences, indptr, k);
    detail::check_whole("v", v, k.tokens);
    begin(sequences, [&](std::size_t i, Pending& call) {
      Cache& cache = *sequences[i].cache;
      call.layer = &cache.own_layer(layer);
      return cache.calls_.begin_append(*call.layer, detail::part_of(k, indptr, i),
                                       detail::part_of(v, indptr, i), sequences[i].options.tree,
                                       cache.options_);
    });
    return end([&](const Pending& call) {
      const std::size_t i = call.sequence;
      Cache& cache = *sequences[i].cache;
      cache.calls_.end_append(*call.layer, detail::part_of(k, indptr, i), detail::part_of(v, indptr, i),
                              sequences[i].options.tree, cache.options_);
    });
  }

  template <class Q, class Out>
  std::span<const LeftOut> attend(std::size_t layer, std::span<const Sequence> sequences,
                                  std::span<const std::int32_t> indptr, const TensorView<Q>& q,
                                  const TensorView<Out>& out) {
    return attend(layer, sequences, indptr, ConstTensor{q}, MutableTensor{out});
  }
  std::span<const LeftOut> attend(std::size_t layer, std::span<const Sequence> sequences,
                                  std::span<const std::int32_t> indptr, const ConstTensor& q,
                                  const MutableTensor& out) {
    check("attend", sequences, indptr, q);
    detail::check_whole("out", out, q.tokens);
    check_written_once(out);
    begin(sequences, [&](std::size_t i, Pending& call) {
      Cache& cache = *sequences[i].cache;
      call.layer = &cache.read_by(layer);
      call.options = cache.completed(sequences[i].options, layer);
      call.attention = cache.calls_.begin_attend(*call.layer, layer, cache.plan_.shape().layer(layer).q_heads,
                                                 detail::part_of(q, indptr, i),
                                                 detail::part_of(out, indptr, i), call.options);
      return call.attention.queries.tokens > 0;
    });
    attend_pending(sequences);
    return end([&](const Pending& call) {
      Cache& cache = *sequences[call.sequence].cache;
      cache.calls_.end_attend(*call.layer, layer, detail::part_of(q, indptr, call.sequence), call.options);
    });
  }

 private:
  using Calls = detail::LayerCalls<E, Engine>;

  // A sequence's call between its beginning and its end.
  struct Pending {
    std::size_t sequence = 0;
    CacheLayer<E>* layer = nullptr;
    AttendOptions options = {};
    LayerAttention attention = {};
    bool attended = false;
  };

  // `first`: the call's first tensor.
  void check(const char* call, std::span<const Sequence> sequences, std::span<const std::int32_t> indptr,
             const ConstTensor& first) {
    detail::check_whole("the first tensor", first, first.tokens);
    detail::check_sequences(call, sequences, indptr, first.tokens, caches_);
  }

  // Begins the calls of all sequences, or of none. `begin_one` returns whether there is anything to do.
  template <class BeginOne>
  void begin(std::span<const Sequence> sequences, BeginOne begin_one) {
    pending_.clear();
    left_out_.clear();
    works_.clear();
    // Later additions to these lists must not allocate.
    pending_.reserve(sequences.size());
    left_out_.reserve(sequences.size());
    works_.reserve(sequences.size());
    detail::begin_each(
        sequences.size(), left_out_,
        [&](std::size_t i) {
          Pending call{.sequence = i};
          if (begin_one(i, call)) pending_.push_back(call);
        },
        [&] { abandon(); });
  }

  // Computes the attention of all pending calls and lets heads add it up. If the engine fails for all together, it does
  // not say for which sequence. Then each is called by itself, which gives the same bits, and what fails again belongs
  // to that sequence.
  void attend_pending(std::span<const Sequence> sequences) {
    // A call that chooses its rows (Read::bounded) is attended by itself.
    const auto chooses = [](const Pending& call) { return call.attention.options.read == Read::bounded; };
    bool attended = false;
    if constexpr (BatchedEngine<Engine>) {
      for (const Pending& call : pending_) {
        if (!chooses(call)) works_.push_back(call.attention);
      }
      KVPOLICY_TRY {
        engine_.attend_all(works_);
        attended = true;
      }
      KVPOLICY_CATCH_ALL {
        // Said below, of the sequence.
      }
    }
    std::size_t next = 0;  // of pending_, which is in the order of the sequences
    detail::begin_each(
        sequences.size(), left_out_,
        [&](std::size_t i) {
          if (next == pending_.size() || pending_[next].sequence != i) return;
          Pending& call = pending_[next++];
          if (chooses(call)) {
            detail::bounded_attention().attend(engine_, call.attention);
          } else if (!attended) {
            engine_.attend(call.attention);
          }
          sequences[i].cache->calls_.observe_call(*call.layer, call.attention);
          call.attended = true;
        },
        [&] { abandon(); });
    std::erase_if(pending_, [&](const Pending& call) {
      if (!call.attended) Calls::abandon(*call.layer);
      return !call.attended;
    });
  }

  // Ends the pending calls, which cannot fail.
  template <class EndOne>
  std::span<const LeftOut> end(EndOne end_one) {
    for (const Pending& call : pending_) end_one(call);
    pending_.clear();
    std::ranges::sort(left_out_, {}, &LeftOut::sequence);
    return left_out_;
  }

  void abandon() noexcept {
    for (const Pending& call : pending_) Calls::abandon(*call.layer);
    pending_.clear();
    left_out_.clear();
  }

  Engine engine_;
  // The lists of the current call.
  std::vector<Cache*> caches_;
  std::vector<Pending> pending_;
  std::vector<LayerAttention> works_;
  std::vector<LeftOut> left_out_;
};

}  // namespace kvpolicy
