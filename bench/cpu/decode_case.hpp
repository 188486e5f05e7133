// SPDX-License-Identifier: Apache-2.0
//
// Times one token's step through one layer of cached rows with cold caches: `append`, which commits
// the row before it to its policy, and `attend`. Samples go through layers in turn that together
// read several times the size of the third-level cache; where that would take too much memory or
// time, the caches are emptied between samples instead. The text grows by a token with every step,
// as in real use.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <functional>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/policy/top_rows.hpp>

#include "check.hpp"
#include "workload.hpp"

namespace kvpolicy::bench {

template <Element E>
struct DecodeCase {
  std::string name;
  std::string baseline;  ///< the case to compute a ratio to; empty: none
  std::string rows_of;   ///< cases with the same value share their rows
  std::function<HeadPlan<E>(std::size_t layers)> plan;
  std::size_t tokens = 0;  ///< at the first step, the query's own row included
  std::size_t layers = 1;  ///< in one sample, where layers differ
  Read read = Read::all;
  bool refresh = false;     ///< every step chooses new chunks
  bool compressed = false;  ///< budgets are enforced after the prompt
  bool flushed = false;     ///< one layer, and caches are emptied: for long texts
  std::size_t samples = 0;  ///< minimum; 0: that of all cases
};

/// A filled cache.
template <Element E>
class DecodeRig {
 public:
  DecodeRig(const DecodeCase<E>& what, const Run& run)
      : prompt_{what.tokens - 1},
        cache_{sized_plan(what, run), {.max_append = portion_rows, .memory = &memory_}, Engine{}},
        numbers_{portion_rows * shape().kv_heads * shape().head_dim},
        query_numbers_{shape().q_heads * shape().head_dim},
        chosen_at_(shape().layers),
        out_(shape().q_heads * shape().head_dim) {
    for (std::size_t layer = 0; layer < shape().layers; ++layer) {
      if (what.compressed) {
        // Budgets are enforced by the latest queries, so the last rows are appended with queries.
        fill(cache_, numbers_, layer, prompt_ - std::min(prompt_, last_rows));
        while (cache_.tokens(layer) < prompt_) step(layer, {});
        cache_.compress(layer);
      } else {
        fill(cache_, numbers_, layer, prompt_);
      }
    }
    cache_.commit();
  }

  [[nodiscard]] const ModelShape& shape() const { return cache_.plan().shape(); }
  [[nodiscard]] const HeadPlan<E>& plan() const { return cache_.plan(); }
  /// Whether samples over several layers find no row in the processor's caches.
  [[nodiscard]] bool is_cold(const DecodeCase<E>& what, const Run& run) const {
    return bytes(what) * static_cast<double>(shape().layers) >= run.cold_bytes();
  }
  void use_threads(std::size_t threads) { cache_.engine() = Engine{pool_of(threads)}; }

  /// Makes every layer choose chunks, for steps that use an existing selection.
  void choose() {
    for (std::size_t layer = 0; layer < shape().layers; ++layer) {
      step(layer, {.read = Read::selected, .refresh_selection = true});
      chosen_at_[layer] = cache_.tokens(layer) - 1;
    }
  }

  struct Times {
    double append = 0.0;
    double attend = 0.0;
  };
  Times step(std::size_t layer, const AttendOptions& options) {
    const auto k = row();
    const auto v = row();
    const auto q = query();
    Times times;
    times.append = seconds_of([&] { cache_.append(layer, k, v); });
    times.attend = seconds_of([&] { cache_.attend(layer, q, out_view(), options); });
    benchmark::DoNotOptimize(out_.data());
    return times;
  }

  /// Checks a step of this layer. Returns the error, if any.
  [[nodiscard]] std::optional<std::string> verify(const DecodeCase<E>& what, const Run& run,
                                                  std::size_t layer) {
    cache_.commit();
    const std::size_t position = cache_.tokens(layer);
    const auto k = row();
    const auto v = row();
    const auto q = query();
    Check check{shape(), q};
    const auto heads = checked_heads(plan(), layer, run.smoke);
    const auto expect = [&](bool with_own) {
      for (const std::size_t head : heads) {
        SegmentList segments = cache_.segments(layer, head, what.read);
        if (with_own) segments.push_back(own_rows(k, v, head, position));
        check.expect(0, head, segments,
                     {static_cast<std::int64_t>(position), window_of(plan(), layer, head)});
      }
    };
    // Rows are expected before the step, because the step may commit and quantise a row; but a
    // selection that the step makes is only visible after it.
    if (!what.refresh) expect(true);
    cache_.append(layer, k, v);
    poison(out_);
    cache_.attend(layer, q, out_view(), {.read = what.read, .refresh_selection = what.refresh});
    spoil_output(run, out_);
    if (what.refresh) expect(false);
    for (const std::size_t head : heads) {
      const HeadReads reads = reads_of(plan(), layer, head, position + 1, history(what, layer));
      if (auto wrong = check.count(head, reads, run)) return wrong;
    }
    auto wrong = check.compare(out_);
    error_ = check.error();
    return wrong;
  }
  [[nodiscard]] double error() const { return error_; }

  /// Counted bytes of a layer at the current length, as a mean over the layers.
  [[nodiscard]] double bytes(const DecodeCase<E>& what) const {
    double bytes = 0.0;
    for (std::size_t layer = 0; layer < shape().layers; ++layer) {
      bytes += layer_bytes(plan(), layer, cache_.tokens(layer), history(what, layer));
    }
    return bytes / static_cast<double>(shape().layers);
  }
  /// The next layer to sample, in turn.
  [[nodiscard]] std::size_t next_layer() { return std::exchange(next_, (next_ + 1) % shape().layers); }

 private:
  // Steps after the prompt before budgets are enforced: as many as SnapKV's observation window.
  static constexpr std::size_t last_rows = 8;

  [[nodiscard]] TensorView<const E> row() { return numbers_.tensor(1, shape().kv_heads, shape().head_dim); }
  [[nodiscard]] TensorView<const float> query() {
    return query_numbers_.tensor(1, shape().q_heads, shape().head_dim);
  }
  [[nodiscard]] TensorView<float> out_view() { return {out_.data(), 1, shape().q_heads, shape().head_dim}; }
  [[nodiscard]] History history(const DecodeCase<E>& what, std::size_t layer) const {
    return {.compressed_at = prompt_,
            .chosen_at = chosen_at_[layer],
            .selected = what.read == Read::selected,
            .refreshes = what.refresh};
  }

  // As many layers as needed for cold caches, limited by memory.
  [[nodiscard]] static HeadPlan<E> sized_plan(const DecodeCase<E>& what, const Run& run) {
    HeadPlan<E> few = what.plan(what.layers);
    if (what.flushed) return few;
    const History history{.compressed_at = what.tokens,
                          .chosen_at = what.tokens,
                          .selected = what.read == Read::selected,
                          .refreshes = what.refresh};
    double read = 0.0;
    for (std::size_t layer = 0; layer < what.layers; ++layer) {
      read += layer_bytes(few, layer, what.tokens, history);
    }
    const auto held = static_cast<double>(few.memory(what.tokens, {}, what.compressed).total());
    const double wanted = std::ceil(run.cold_bytes() / read);
    const double room = std::floor(static_cast<double>(run.memory_bytes) / held);
    const double times = std::clamp(std::min(wanted, room), 1.0, 64.0);
    return what.plan(what.layers * static_cast<std::size_t>(times));
  }

  std::size_t prompt_;
  cpu::HugePages memory_;
  Cache<E> cache_;
  Numbers<E> numbers_;
  Numbers<float> query_numbers_;
  std::vector<std::size_t> chosen_at_;  // [layers]
  std::vector<float> out_;
  std::size_t next_ = 0;
  double error_ = 0.0;
};

/// Times the selection of a case's chunks in one layer, from random scores, in seconds.
template <Element E>
[[nodiscard]] double seconds_to_select(const HeadPlan<E>& plan, std::size_t tokens) {
  double seconds = 0.0;
  const HeadRule rule = plan.at(0, 0).rule(plan.shape().head_dim);
  if (rule.chunk > 0) {
    const std::size_t chunks = tokens / rule.chunk;
    Numbers<float> numbers{chunks};
    Samples samples;
    for (int i = 0; i < 20; ++i) {
      const auto scores = numbers.tensor(1, 1, chunks);
      samples.add(seconds_of([&] {
        auto chosen = top_rows(std::span{scores.data, chunks}, rule.chosen_rows / rule.chunk);
        benchmark::DoNotOptimize(chosen.data());
      }));
    }
    seconds = samples.median() * static_cast<double>(plan.shape().kv_heads);
  }
  return seconds;
}

template <Element E>
void run_decode(benchmark::State& state, Run& run, const DecodeCase<E>& what, std::size_t threads) {
  const std::string tail = "/threads:" + std::to_string(threads);
  guarded(state, run, what.name + tail, [&] {
    using Rig = DecodeRig<E>;
    Rig& rig = run.rig<Rig>(what.rows_of, [&] { return new Rig{what, run}; });
    rig.use_threads(threads);
    if (what.read == Read::selected && !what.refresh) rig.choose();
    const std::size_t checked = run.smoke ? rig.shape().layers : what.layers;
    for (std::size_t layer = 0; layer < checked; ++layer) {
      if (const auto wrong = rig.verify(what, run, layer)) {
        return refuse(state, run, message(what.name, tail, ", layer ", layer, ": ", *wrong));
      }
    }
    const AttendOptions options{.read = what.read, .refresh_selection = what.refresh};
    const bool flushes = what.flushed || !rig.is_cold(what, run);
    Samples samples;
    double appends = 0.0;
    const auto sample = [&](bool counts) {
      if (flushes && !run.smoke) run.flush();
      typename Rig::Times times;
      for (std::size_t i = 0; i < what.layers; ++i) {
        const auto one = rig.step(rig.next_layer(), options);
        times.append += one.append;
        times.attend += one.attend;
      }
      if (!counts) return;
      samples.add(times.append + times.attend);
      appends += times.append;
    };
    for (int i = 0; i < 3; ++i) sample(false);
    const double bytes_before = rig.bytes(what);
    Patience patience = run.patience();
    if (!run.smoke) patience.least = std::max(patience.least, what.samples);
    for (auto _ : state) {
      const Neighbours neighbours;
      BetweenSamples ceiling{patience, [&] { return run.reading(threads, 1); }};
      repeat(patience, [&] {
        ceiling.step(samples);
        sample(true);
      });
      const auto units = static_cast<double>(what.layers);
      report_times(state, run, what.name + tail, samples, neighbours, units);
      const double seconds = samples.median() / units;
      report_bytes(state, ceiling.median(), seconds, (bytes_before + rig.bytes(what)) / 2);
      report_ratio(state, run, what.baseline.empty() ? "" : what.baseline + tail, seconds);
      state.counters["append_percent"] = 100 * appends / samples.sum();
      if (what.refresh) {
        state.counters["select_percent"] = 100 * seconds_to_select(rig.plan(), what.tokens) / seconds;
      }
      state.counters["rows"] = static_cast<double>(what.tokens);
      state.counters["layers"] = static_cast<double>(rig.shape().layers);
      state.counters["flushed"] = flushes ? 1.0 : 0.0;
      state.counters["error"] = rig.error();
    }
  });
}

}  // namespace kvpolicy::bench
