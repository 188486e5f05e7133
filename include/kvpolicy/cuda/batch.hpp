// SPDX-License-Identifier: Apache-2.0
//
// A step of many sequences on a device (cache/batch.hpp is the host's): one attention launch for the sequences
// with few queries, one for parts of prompts, and one that keeps the rows of all, whatever their policies,
// lengths and formats.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <span>
#include <string_view>
#include <utility>
#include <vector>

#include <kvpolicy/cache/batch_call.hpp>
#include <kvpolicy/core/tensor_view.hpp>
#include <kvpolicy/cuda/kv_cache.hpp>
#include <kvpolicy/cuda/layer_call.hpp>
#include <kvpolicy/cuda/sequence_table.hpp>

namespace kvpolicy::gpu {

/// Steps of many sequences, whose caches share the batch's engine. Tensors are ragged and in device memory: the
/// tokens of all sequences one after another, and on the host `indptr`, which says where each sequence's begin.
///
/// Each sequence keeps the same bits as by calls of its own. What it reads is equal to rounding, for how the work
/// is divided among the device's blocks depends on all sequences of a call.
///
/// Heads that add up attention, choose chunks or compress need launches of their own besides, and a sequence with
/// rows in slow memory, or with Launches::separate, is attended by itself.
///
/// Not synchronised; calls are in order whatever their stream, as KvCache's. What cannot be part of a graph is
/// refused there; SeatedBatch is what graphs are captured of.
template <Element E>
class Batch {
 public:
  using Cache = KvCache<E>;
  using Sequence = BatchSequence<Cache>;
  using Rows = TensorView<const E>;
  using Out = TensorView<E>;

  /// `max_sequences`: the most of a call.
  /// @throws ConfigError for a number that does not fit, std::bad_alloc, DeviceError
  Batch(std::shared_ptr<Engine<E>> engine, std::size_t max_sequences,
        MemoryResource* memory = default_memory(), cudaStream_t stream = nullptr)
      : engine_{std::move(engine)},
        table_{checked_layers(max_sequences), max_sequences, memory, stream},
        order_{stream} {
    order_.mark();
  }
  Batch(Batch&&) noexcept = default;
  Batch& operator=(Batch&&) = delete;
  ~Batch() { table_.give_back_on(order_.end()); }

  [[nodiscard]] const std::shared_ptr<Engine<E>>& engine() const { return engine_; }
  [[nodiscard]] std::size_t max_sequences() const { return table_.max_sequences(); }

  /// KvCache::step of every sequence. The tokens [indptr[i], indptr[i + 1]) of all tensors are those of
  /// sequence i; there may be none. Returns the sequences that were left out because they lack memory, in
  /// ascending order, valid until the next call; the others' steps are on the stream.
  /// @throws ShapeError for an indptr that does not fit or too many sequences, ConfigError for a cache that is
  /// missing, listed twice or of another engine, and for sequences whose pages or logits (scale, soft cap, sink
  /// logits) are not alike; CaptureError inside a capture; as KvCache::step, with the sequence's number. Whatever
  /// throws, but for a DeviceError, leaves all sequences as they were.
  std::span<const LeftOut> step(std::size_t layer, std::span<const Sequence> sequences,
                                std::span<const std::int32_t> indptr, const Rows& q, const Rows& k,
                                const Rows& v, const Out& out, cudaStream_t stream = nullptr) {
    refuse_capture(stream, "a step of a batch");
    check(sequences, indptr, q, k, v, out);
    order_.enter(stream);
    begin(layer, sequences, indptr, q, k, v, out, stream);
    const auto own_rows = [&](std::size_t i) { return own_part(k, indptr, i); };
    run_alone([&](Pending& one) {
      one.call.run(own_rows(one.sequence), own_part(v, indptr, one.sequence),
                   own_part(out, indptr, one.sequence));
    });
    if (!pending_.empty()) {
      write_table(layer, sequences.size(), indptr, stream);
      attend(layer, sequences, q, k, v, out, stream);
      for (Pending& one : pending_) {
        const Rows rows = own_rows(one.sequence);
        one.call.note_attention(&rows, /*keeps_queries=*/false);
      }
      keep(layer, q, k, v, stream);
      for (Pending& one : pending_) one.call.end_step();
    }
    std::ranges::sort(left_out_, {}, &LeftOut::sequence);
    return left_out_;
  }

 private:
  // A sequence's step that has begun.
  struct Pending {
    std::size_t sequence;
    LayerCall<E> call;
  };

  [[nodiscard]] std::size_t checked_layers(std::size_t max_sequences) const {
    check_sequence_count("gpu::Batch", *engine_, max_sequences);
    return engine_->shape().layers;
  }

  void check(std::span<const Sequence> sequences, std::span<const std::int32_t> indptr, const Rows& q,
             const Rows& k, const Rows& v, const Out& out) {
    kvpolicy::detail::check_whole("q", ConstTensor{q}, q.tokens);
    kvpolicy::detail::check_whole("k", ConstTensor{k}, q.tokens);
    kvpolicy::detail::check_whole("v", ConstTensor{v}, q.tokens);
    kvpolicy::detail::check_whole("out", MutableTensor{out}, q.tokens);
    check_written_once(MutableTensor{out});
    kvpolicy::detail::check_sequences("step", sequences, indptr, q.tokens, caches_);
    require<ShapeError>(sequences.size() <= max_sequences(), "gpu::Batch::step: ", sequences.size(),
                        " sequences, the batch takes ", max_sequences());
    for (std::size_t i = 0; i < sequences.size(); ++i) {
      const Sequence& one = sequences[i];
      require(one.cache->engine() == engine_, "gpu::Batch::step: sequence ", i,
              " has another engine; the caches of a batch share its engine");
      const AttendOptions& first = sequences[0].options;
      const AttendOptions& own = one.options;
      const bool alike = own.scale == first.scale && own.softcap == first.softcap &&
                         own.attention_sink_bias.data() == first.attention_sink_bias.data();
      require(alike, "gpu::Batch::step: sequence ", i,
              " has another scale, soft cap or sink logits than sequence 0; one launch makes all logits");
      require(one.cache->options().page_rows == sequences[0].cache->options().page_rows,
              "gpu::Batch::step: sequence ", i, " has pages of ", one.cache->options().page_rows,
              " rows, sequence 0 of ", sequences[0].cache->options().page_rows,
              "; those of one launch have as many");
    }
  }

  // The tokens of one sequence.
  template <class View>
  [[nodiscard]] static View own_part(const View& tensor, std::span<const std::int32_t> indptr,
                                     std::size_t sequence) {
    const auto first = static_cast<std::size_t>(indptr[sequence]);
    return tensor.slice(first, static_cast<std::size_t>(indptr[sequence + 1]) - first);
  }

  // Checks every sequence and obtains its memory; nothing else changes.
  void begin(std::size_t layer, std::span<const Sequence> sequences, std::span<const std::int32_t> indptr,
             const Rows& q, const Rows& k, const Rows& v, const Out& out, cudaStream_t stream) {
    pending_.clear();
    left_out_.clear();
    pending_.reserve(sequences.size());
    left_out_.reserve(sequences.size());
    kvpolicy::detail::begin_each(
        sequences.size(), left_out_,
        [&](std::size_t i) {
          LayerCall<E> call{sequences[i].cache->cache_, layer, sequences[i].options, stream};
          if (call.begin_step(own_part(q, indptr, i), own_part(k, indptr, i), own_part(v, indptr, i),
                              own_part(out, indptr, i))) {
            pending_.push_back({i, std::move(call)});
          }
        },
        [&] {
          pending_.clear();
          left_out_.clear();
        });
  }

  // The calls that no launch of many serves, one after another.
  template <class Run>
  void run_alone(Run run) {
    for (Pending& one : pending_) {
      if (one.call.is_alone()) run(one);
    }
    std::erase_if(pending_, [](const Pending& one) { return one.call.is_alone(); });
  }

  // Tells the device of the calls that are left, and of no others.
  void write_table(std::size_t layer, std::size_t count, std::span<const std::int32_t> indptr,
                   cudaStream_t stream) {
    queries_.assign(count, 0);
    DeviceWrites writes{stream};
    auto next = pending_.begin();
    for (std::size_t i = 0; i < count; ++i) {
      CallSequence told;
      if (next != pending_.end() && next->sequence == i) {
        next->call.describe();
        told = next->call.told(static_cast<std::size_t>(indptr[i]));
        queries_[i] = told.tokens;
        ++next;
      }
      table_.write(layer, i, told, writes);
    }
    writes.flush();
  }

  void attend(std::size_t layer, std::span<const Sequence> sequences, const Rows& q, const Rows& k,
              const Rows& v, const Out& out, cudaStream_t stream) const {
    AttendParams params{.ragged = table_.layer(layer),
                        .sequences = static_cast<int>(queries_.size()),
                        .kv_heads = static_cast<int>(engine_->shape().kv_heads),
                        .group = static_cast<int>(engine_->shape().queries_per_kv()),
                        .page_rows = static_cast<int>(sequences[0].cache->options().page_rows),
                        .q = tensor_of(q),
                        .k = tensor_of(k),
                        .v = tensor_of(v),
                        .out = tensor_of(Rows{out})};
    set_logits(params, sequences[0].options, q.head_dim);
    bool packs = false;
    std::size_t longest = 0;
    for (const Pending& one : pending_) {
      packs = packs || one.call.layer().packs();
      longest = std::max(longest, one.call.longest_read());
    }
    engine_->attend_ragged(params, queries_, packs, longest, stream);
  }

  void keep(std::size_t layer, const Rows& q, const Rows& k, const Rows& v, cudaStream_t stream) {
    const int most = *std::ranges::max_element(queries_);
    AppendParams params{.ragged = table_.layer(layer),
                        .sequences = static_cast<int>(queries_.size()),
                        .kv_heads = static_cast<int>(engine_->shape().kv_heads),
                        .page_rows = pending_.front().call.page_rows(),
                        .rows = most,
                        .commit_rows = most,
                        .k = tensor_of(k),
                        .v = tensor_of(v),
                        .q = tensor_of(q),
                        .group = static_cast<int>(engine_->shape().queries_per_kv())};
    std::size_t jobs = 0;
    bool flushes = false;
    own_summaries_.clear();
    for (const Pending& one : pending_) {
      const Layer& own = one.call.layer();
      jobs = std::max(jobs, own.most_commit_jobs(static_cast<std::size_t>(queries_[one.sequence])));
      flushes = flushes || own.flushes();
      for (const std::string_view name : own.own_summaries) {
        if (std::ranges::count(own_summaries_, name) == 0) own_summaries_.push_back(name);
      }
    }
    engine_->append(params, jobs, stream, /*slow=*/false, flushes, own_summaries_);
  }

  std::shared_ptr<Engine<E>> engine_;
  SequenceTable table_;
  StreamOrder order_;
  // The lists of the current call.
  std::vector<Cache*> caches_;
  std::vector<Pending> pending_;
  std::vector<LeftOut> left_out_;
  std::vector<int> queries_;
  std::vector<std::string_view> own_summaries_;
};

}  // namespace kvpolicy::gpu
