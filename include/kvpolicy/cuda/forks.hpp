// SPDX-License-Identifier: Apache-2.0
//
// Makes caches from other caches on the device: forks, which share full pages, and forks under another
// plan, whose changed heads are given every row again. Nothing here waits for the device.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <utility>

#include <kvpolicy/cache/other_plan_checks.hpp>
#include <kvpolicy/cuda/device_state.hpp>
#include <kvpolicy/cuda/engine.hpp>
#include <kvpolicy/cuda/layer.hpp>
#include <kvpolicy/cuda/writes.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::cuda {

template <Element E>
class KvCache;

/// What stands behind KvCache::fork and KvCache::fork_as, which are what to call.
template <Element E>
class CacheForks {
  using Cache = KvCache<E>;

 public:
  [[nodiscard]] static Cache fork(const Cache& from, cudaStream_t stream,
                                  std::shared_ptr<Engine<E>> engine) {
    begin(from, "fork", stream);
    Cache to{from.plan_, from.options_, engine == nullptr ? from.engine_ : std::move(engine), stream};
    to.require_own_shape();
    const bool slow = from.options_.has_slow_memory();
    to.device_ = DeviceState{from.plan_.shape(), slow, from.options_.memory, stream};
    if (to.engine_ != from.engine_ && slow) to.make_staging(from.stage_extent(), stream);
    if (from.accumulates_any()) to.engine_->prepare_accumulation(stream);
    DeviceWrites writes{stream};
    for (std::size_t l = 0; l < from.layers_.size(); ++l) {
      to.layers_.push_back(from.layers_[l].fork(
          writes, [&](const HeadRule& head) { return to.device_.frequencies(head, writes); }));
      to.device_.describe(l, to.layers_[l], writes);
      writes.write(to.device_.counters(l), from.layers_[l].state());
    }
    writes.flush();
    return to;
  }

  [[nodiscard]] static Cache fork_as(const Cache& from, HeadPlan<E> plan, cudaStream_t stream,
                                     std::shared_ptr<Engine<E>> engine) {
    check_same_shape(Cache::name, from.plan_.shape(), plan.shape());
    begin(from, "fork_as", stream);
    Cache to{std::move(plan), from.options_, stream,
             engine == nullptr ? from.engine_ : std::move(engine)};
    for (std::size_t l = 0; l < from.layers_.size(); ++l) take_layer(to, from, l, stream);
    return to;
  }

 private:
  static void begin(const Cache& from, const char* call, cudaStream_t stream) {
    Cache::refuse_capture(stream, call);
    static_cast<void>(held(from.layers_));
    from.latest_ = stream;
  }

  // `to` is new: whatever throws leaves it to be thrown away.
  static void take_layer(Cache& to, const Cache& from, std::size_t l, cudaStream_t stream) {
    const Layer& old = from.layers_[l];
    Layer& layer = to.layers_[l];
    if (old.tokens == 0) return;
    const auto is_same = [&](std::size_t head) { return to.plan_.at(l, head) == from.plan_.at(l, head); };
    DeviceWrites writes{stream};
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      const HeadStore& own = old.heads[head];
      if (!is_same(head)) {
        check_rows(own, old, l, head);
        check_accumulated(Cache::name, l, head, accumulates(layer.heads[head].settings()),
                          accumulates(own.settings()));
        continue;
      }
      layer.heads[head].give_back_on(stream);
      layer.heads[head] = own.fork(old.tokens, old.committed, old.reached,
                                   to.device_.frequencies(own.settings(), writes), writes);
    }
    writes.flush();
    to.grow(l, 1, old.tokens, stream);
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      if (is_same(head)) continue;
      give_rows(to, old, l, head, stream);
      if (accumulates(layer.heads[head].settings())) {
        check(cudaMemcpyAsync(layer.heads[head].sums().data(), old.heads[head].sums().data(),
                              old.tokens * sizeof(double), cudaMemcpyDeviceToDevice, stream),
              "cudaMemcpyAsync");
      }
    }
    layer.take_text(old, is_same, stream);
    writes.write(to.device_.counters(l), layer.state());
    writes.flush();
    if (!layer.wants_compress()) return;
    to.commit_layer(l, stream);
    to.compress_layers(l, 1, /*only_due=*/true, stream);
  }

  static void check_rows(const HeadStore& own, const Layer& layer, std::size_t l, std::size_t head) {
    const std::size_t committed = layer.committed;
    const std::size_t rows = own.settings().window_rule().kept_rows(committed - own.evicted());
    const bool packed = own.view().keys_end(static_cast<int>(committed)) > own.view().sinks;
    check_exact_rows(Cache::name, l, head, rows, committed, rows == committed, packed);
  }

  // A head of `to` that has no row yet is given all rows of the same head in `old`, where they lie: the
  // tokens of one page after the other. The layer's counters count for this head meanwhile.
  static void give_rows(Cache& to, const Layer& old, std::size_t l, std::size_t head,
                        cudaStream_t stream) {
    const HeadStore& from = old.heads[head];
    const std::size_t page_rows = to.options_.page_rows;
    DeviceWrites writes{stream};
    writes.write(to.device_.counters(l), LayerState{});
    writes.flush();
    for (std::size_t row = 0; row < old.tokens;) {
      const auto slot = static_cast<std::size_t>(from.view().exact_slot(static_cast<int>(row)));
      const std::size_t sinks = from.settings().sinks;
      const std::size_t end = row < sinks ? std::min(sinks, old.tokens) : old.tokens;
      const std::size_t rows = std::min(end - row, page_rows - slot % page_rows);
      std::byte* page = from.exact().page(slot / page_rows);
      const auto in_page = static_cast<int>(slot % page_rows);
      const std::size_t last = row + rows;
      AppendParams params{.heads = to.device_.heads(l) + head, .states = to.device_.counters(l),
                          .sequences = 1, .kv_heads = 1, .page_rows = static_cast<int>(page_rows),
                          .rows = static_cast<int>(rows), .commit_rows = static_cast<int>(rows),
                          .max_rollback = static_cast<int>(last - std::min(last, old.committed))};
      const auto stride = static_cast<long long>(from.view().exact_row_stride / sizeof(E));
      params.k = {.data = from.view().exact_place(page, in_page, true), .token_stride = stride};
      params.v = {.data = from.view().exact_place(page, in_page, false), .token_stride = stride};
      params.out_of_range = to.device_.out_of_range();
      to.engine_->append(params, to.layers_[l].most_commit_jobs(rows), stream,
                         to.layers_[l].heads[head].is_slow(), to.layers_[l].flushes());
      row = last;
    }
  }
};

}  // namespace kvpolicy::cuda
