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
#include <kvpolicy/cache/progress_checks.hpp>
#include <kvpolicy/cuda/cached_layers.hpp>
#include <kvpolicy/cuda/commit.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy::gpu {

/// What carries out KvCache::fork and KvCache::fork_as, which are what to call.
template <Element E>
class CacheForks {
  using Cache = CachedLayers<E>;

 public:
  [[nodiscard]] static Cache fork(const Cache& from, cudaStream_t stream, std::shared_ptr<Engine<E>> engine) {
    begin(from, "fork", stream);
    Cache to{from.plan, from.options, stream, engine == nullptr ? from.engine : std::move(engine)};
    to.enter(stream);
    for (const Layer& layer : from.layers) {
      for (const HeadStore& head : layer.heads) to.engine->own_kernels().check_has(head.settings());
    }
    const bool slow = from.options.has_slow_memory();
    to.device = DeviceState{from.plan.shape(), slow, from.options.memory, stream};
    if (to.engine != from.engine && slow) to.make_staging(from.stage_extent(), stream);
    if (from.accumulates()) to.engine->prepare_accumulation(stream);
    to.observed_rows = from.observed_rows;
    DeviceWrites writes{stream};
    for (std::size_t l = 0; l < from.layers.size(); ++l) {
      to.layers.push_back(from.layers[l].fork(
          writes, [&](const HeadRule& head) { return to.device.frequencies(head, writes); }));
      to.device.describe(l, to.layers[l], writes);
      writes.write(to.device.counters(l), from.layers[l].state());
    }
    writes.flush();
    end(from, to, stream);
    return to;
  }

  [[nodiscard]] static Cache fork_as(const Cache& from, HeadPlan<E> plan, cudaStream_t stream,
                                     std::shared_ptr<Engine<E>> engine) {
    check_same_shape(Cache::name, from.plan.shape(), plan.shape());
    begin(from, "fork_as", stream);
    Cache to{std::move(plan), from.options, stream, engine == nullptr ? from.engine : std::move(engine)};
    to.enter(stream);
    to.make_layers(stream);
    to.observed_rows = from.observed_rows;
    for (std::size_t l = 0; l < from.layers.size(); ++l) take_layer(to, from, l, stream);
    end(from, to, stream);
    return to;
  }

  /// Refuses a cache whose scores are not of a fork of `own` that has only read more since. @throws ShapeError
  static void check_grew(const Cache& own, const Cache& scored) {
    for_each_waiting(own, [&](std::size_t l, std::size_t head) {
      const Layer& here = own.layers[l];
      const Layer& there = scored.layers[l];
      check_grew_only(Cache::name, l, head, here.committed - here.heads[head].evicted(), here.committed,
                      there.committed - there.heads[head].evicted(), there.committed);
    });
  }
  /// What carries out KvCache::take_scores, after that check.
  static void take_scores(Cache& own, const Cache& scored, cudaStream_t stream) {
    scored.enter(stream);
    own.enter(stream);
    for_each_waiting(own, [&](std::size_t l, std::size_t head) {
      HeadStore& here = own.layers[l].heads[head];
      const HeadStore& there = scored.layers[l].heads[head];
      here.sums().take(there.sums(), own.layers[l].committed - here.evicted(), stream);
      here.set_scored(std::min(there.scored(), own.layers[l].committed));
    });
    scored.order.release(stream);
    if (scored.engine != own.engine) scored.engine->leave(stream);
  }

 private:
  template <class Visit>
  static void for_each_waiting(const Cache& cache, Visit visit) {
    for (std::size_t l = 0; l < held(cache.layers).size(); ++l) {
      for (std::size_t head = 0; head < cache.layers[l].heads.size(); ++head) {
        if (cache.layers[l].heads[head].settings().waits_for_scoring) visit(l, head);
      }
    }
  }

  static void begin(const Cache& from, const char* call, cudaStream_t stream) {
    refuse_capture(stream, call);
    static_cast<void>(held(from.layers));
    from.enter(stream);
  }

  // The fork's stream is not one that the other cache depends on.
  static void end(const Cache& from, const Cache& to, cudaStream_t stream) {
    to.order.mark();
    from.order.release(stream);
    if (from.engine != to.engine) from.engine->leave(stream);
  }

  // `to` is new: whatever throws leaves it to be thrown away.
  static void take_layer(Cache& to, const Cache& from, std::size_t l, cudaStream_t stream) {
    const Layer& old = from.layers[l];
    Layer& layer = to.layers[l];
    if (old.tokens == 0) return;
    const auto is_same = [&](std::size_t head) { return to.plan.at(l, head) == from.plan.at(l, head); };
    DeviceWrites writes{stream};
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      const HeadStore& own = old.heads[head];
      if (!is_same(head)) {
        check_rows(own, old, l, head);
        const HeadRule& rule = layer.heads[head].settings();
        // A scoring pass may come later.
        check_accumulated(Cache::name, l, head, accumulates(rule) && !rule.waits_for_scoring,
                          adds_up_alike(own.settings(), rule));
        continue;
      }
      layer.heads[head].give_back_on(stream);
      layer.heads[head] = own.fork(old.tokens, old.committed, old.reached,
                                   to.device.frequencies(own.settings(), writes), writes);
    }
    writes.flush();
    to.grow(l, 1, old.tokens, stream);
    for (std::size_t head = 0; head < layer.heads.size(); ++head) {
      if (is_same(head)) continue;
      give_rows(to, old, l, head, stream);
      HeadStore& own = layer.heads[head];
      if (adds_up_alike(old.heads[head].settings(), own.settings())) {
        own.sums().take(old.heads[head].sums(), old.tokens, stream);
        own.set_scored(old.heads[head].scored());
      }
    }
    layer.take_text(old, is_same, stream);
    writes.write(to.device.counters(l), layer.state());
    writes.flush();
    if (!layer.wants_compress()) return;
    commit_layer(to, l, stream);
    compress_layers(to, l, 1, /*only_due=*/true, stream);
  }

  // Whether what one head has added up is what the other would have.
  static bool adds_up_alike(const HeadRule& one, const HeadRule& other) {
    return accumulates(one) && accumulates(other) && one.votes == other.votes &&
           one.waits_for_scoring == other.waits_for_scoring;
  }

  static void check_rows(const HeadStore& own, const Layer& layer, std::size_t l, std::size_t head) {
    const std::size_t committed = layer.committed;
    const std::size_t rows = own.settings().window_rule().kept_rows(committed - own.evicted());
    const bool packed = own.view().keys_end(static_cast<int>(committed)) > own.view().sinks;
    check_exact_rows(Cache::name, l, head, rows, committed, rows == committed, packed);
  }

  // A head of `to` that has no row yet is given all rows of the same head in `old`, where they lie: the
  // tokens of one page after the other. The layer's counters count for this head meanwhile.
  static void give_rows(Cache& to, const Layer& old, std::size_t l, std::size_t head, cudaStream_t stream) {
    const HeadStore& from = old.heads[head];
    const std::size_t page_rows = to.options.page_rows;
    DeviceWrites writes{stream};
    writes.write(to.device.counters(l), LayerState{});
    writes.flush();
    for (std::size_t row = 0; row < old.tokens;) {
      const auto slot = static_cast<std::size_t>(from.view().exact_slot(static_cast<int>(row)));
      const std::size_t sinks = from.settings().sinks;
      const std::size_t end = row < sinks ? std::min(sinks, old.tokens) : old.tokens;
      const std::size_t rows = std::min(end - row, page_rows - slot % page_rows);
      std::byte* page = from.exact().page(slot / page_rows);
      const auto in_page = static_cast<int>(slot % page_rows);
      const std::size_t last = row + rows;
      AppendParams params{.heads = to.device.heads(l) + head,
                          .states = to.device.counters(l),
                          .sequences = 1,
                          .kv_heads = 1,
                          .page_rows = static_cast<int>(page_rows),
                          .rows = static_cast<int>(rows),
                          .commit_rows = static_cast<int>(rows),
                          .max_rollback = static_cast<int>(last - std::min(last, old.committed))};
      const auto stride = static_cast<long long>(from.view().exact_row_stride / sizeof(E));
      params.k = {.data = from.view().exact_row(page, in_page, true), .token_stride = stride};
      params.v = {.data = from.view().exact_row(page, in_page, false), .token_stride = stride};
      params.out_of_range = to.device.out_of_range();
      to.engine->append(params, to.layers[l].most_commit_jobs(rows), stream,
                        to.layers[l].heads[head].is_slow(), to.layers[l].flushes(),
                        to.layers[l].own_summaries);
      row = last;
    }
  }
};

}  // namespace kvpolicy::gpu
