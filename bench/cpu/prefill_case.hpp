// SPDX-License-Identifier: Apache-2.0
//
// Times the attention of a prompt's chunk to all earlier rows and to itself, in one layer:
//
//   prefill  the last chunk of a text. The chunk stays tentative, so every sample repeats the same work.
//            Also the time to append the next chunk, which commits this one to its policies
//   prompt   all chunks of a text, attention only. One of every few chunks is timed, in the middle of
//            those that it represents: cost grows linearly with the text, so their sum is the whole
//   compress the time to enforce budgets after a text, and that of its last chunk's attention
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <limits>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "check.hpp"
#include "workload.hpp"

namespace kvpolicy::bench {

template <Element E>
struct PrefillCase {
  std::string name;
  std::string baseline;               ///< the case to compute a ratio to; empty: none
  std::string rows_of;                ///< cases with the same value share their rows
  std::function<HeadPlan<E>()> plan;  ///< for one layer
  std::size_t tokens = 0;             ///< with the chunk
  std::size_t chunk = portion_rows;
};

/// A cache of one layer and a chunk of queries; queries and outputs are of type `Q`.
template <Element E, Element Q>
class PrefillRig {
 public:
  explicit PrefillRig(const PrefillCase<E>& what)
      : chunk_{what.chunk},
        cache_{what.plan(), {.max_append = what.chunk, .memory = &memory_}, Engine{}},
        numbers_{chunk_ * shape().kv_heads * shape().head_dim},
        query_numbers_{chunk_ * shape().q_heads * shape().head_dim},
        queries_{query_numbers_.tensor(chunk_, shape().q_heads, shape().head_dim)},
        as_float_(chunk_ * shape().q_heads * shape().head_dim),
        check_{shape(), float_queries()},
        out_(as_float_.size()) {
    std::transform(queries_.data, queries_.data + as_float_.size(), as_float_.begin(),
                   [](Q number) { return static_cast<float>(number); });
  }

  [[nodiscard]] const ModelShape& shape() const { return cache_.plan().shape(); }
  [[nodiscard]] const HeadPlan<E>& plan() const { return cache_.plan(); }
  [[nodiscard]] std::size_t tokens() const { return cache_.tokens(); }
  void use_threads(std::size_t threads) { cache_.engine() = Engine{pool_of(threads)}; }

  /// Appends rows up to `tokens` and commits all of them, without attention.
  void fill_to(std::size_t tokens) {
    fill(cache_, numbers_, 0, tokens);
    cache_.commit();
  }
  /// Appends the next chunk; the check expects results for all of its heads if `all_heads`, else
  /// for a few.
  void append_chunk(bool all_heads) {
    const auto k = chunk_rows();
    const auto v = chunk_rows();
    const std::size_t cached = cache_.tokens();
    cache_.commit();
    check_ = Check{shape(), float_queries()};
    for (const std::size_t head : checked_heads(plan(), 0, all_heads)) {
      SegmentList segments = cache_.segments(0, head);
      segments.push_back(own_rows(k, v, head, cached));
      for (const std::size_t token : {std::size_t{0}, chunk_ / 2, chunk_ - 1}) {
        check_.expect(token, head, segments,
                      {static_cast<std::int64_t>(cached + token), window_of(plan(), 0, head)});
      }
    }
    cache_.append(0, k, v);
  }
  double attend() {
    const TensorView<Q> out{out_.data(), chunk_, shape().q_heads, shape().head_dim};
    return seconds_of([&] { cache_.attend(0, queries_, out); });
  }
  /// Checks the attention of the latest chunk. Returns the error, if any.
  [[nodiscard]] std::optional<std::string> verify(const Run& run) {
    std::ranges::fill(out_, Q{std::numeric_limits<float>::quiet_NaN()});
    attend();
    std::vector<float> written(out_.size());
    std::ranges::transform(out_, written.begin(), [](Q number) { return static_cast<float>(number); });
    spoil_output(run, written);
    auto wrong = check_.compare(written);
    error_ = std::max(error_, check_.error());
    return wrong;
  }
  [[nodiscard]] double error() const { return error_; }

  /// Seconds to append the next chunk, in a fork, so that this cache does not change.
  double append_to_fork() {
    const auto k = chunk_rows();
    const auto v = chunk_rows();
    Cache<E> fork = cache_.fork();
    return seconds_of([&] { fork.append(0, k, v); });
  }
  /// Seconds to enforce the heads' budgets, in a fork.
  double compress_fork() {
    Cache<E> fork = cache_.fork();
    return seconds_of([&] { fork.compress(0); });
  }
  /// Floating-point operations of the latest chunk's attention.
  [[nodiscard]] double flops() const { return layer_flops(plan(), 0, tokens() - chunk_, chunk_); }

 private:
  [[nodiscard]] TensorView<const float> float_queries() const {
    return {as_float_.data(), chunk_, shape().q_heads, shape().head_dim};
  }
  [[nodiscard]] TensorView<const E> chunk_rows() {
    return numbers_.tensor(chunk_, shape().kv_heads, shape().head_dim);
  }

  std::size_t chunk_;
  cpu::HugePages memory_;
  Cache<E> cache_;
  Numbers<E> numbers_;
  Numbers<Q> query_numbers_;
  TensorView<const Q> queries_;
  std::vector<float> as_float_;  // the same queries as float
  Check check_;
  std::vector<Q> out_;
  double error_ = 0.0;
};

[[nodiscard]] inline Patience prefill_patience(const Run& run) {
  if (run.smoke) return {.seconds = 0.0, .least = 1, .most = 1};
  return {.seconds = 2 * run.case_seconds, .least = run.quick ? 3U : 5U, .most = 50};
}

/// The rig of a case, with its last chunk appended.
template <Element Q, Element E>
PrefillRig<E, Q>& last_chunk_rig(Run& run, const PrefillCase<E>& what, std::size_t threads) {
  using Rig = PrefillRig<E, Q>;
  Rig& rig = run.rig<Rig>(what.rows_of, [&] {
    auto made = std::make_unique<Rig>(what);
    made->fill_to(what.tokens - what.chunk);
    made->append_chunk(run.smoke);
    return made.release();
  });
  rig.use_threads(threads);
  return rig;
}

template <Element Q, Element E>
void run_prefill(benchmark::State& state, Run& run, const PrefillCase<E>& what, std::size_t threads) {
  const std::string tail = "/threads:" + std::to_string(threads);
  guarded(state, run, what.name + tail, [&] {
    PrefillRig<E, Q>& rig = last_chunk_rig<Q>(run, what, threads);
    if (const auto wrong = rig.verify(run)) {
      return refuse(state, run, message(what.name, tail, ": ", *wrong));
    }
    Samples samples;
    Samples appends;
    for (auto _ : state) {
      const Neighbours neighbours;
      repeat(prefill_patience(run), [&] { samples.add(rig.attend()); });
      for (int i = 0; i < (run.smoke ? 1 : 5); ++i) appends.add(rig.append_to_fork());
      report_times(state, run, what.name + tail, samples, neighbours);
      report_flops(state, run, threads, samples.median(), rig.flops());
      report_ratio(state, run, what.baseline.empty() ? "" : what.baseline + tail, samples.median());
      state.counters["append_percent"] = 100 * appends.median() / samples.median();
      state.counters["rows"] = static_cast<double>(what.tokens);
      state.counters["error"] = rig.error();
    }
  });
}

template <Element Q, Element E>
void run_compress(benchmark::State& state, Run& run, const PrefillCase<E>& what, std::size_t threads) {
  const std::string tail = "/threads:" + std::to_string(threads);
  guarded(state, run, what.name + tail, [&] {
    PrefillRig<E, Q>& rig = last_chunk_rig<Q>(run, what, threads);
    if (const auto wrong = rig.verify(run)) {
      return refuse(state, run, message(what.name, tail, ": ", *wrong));
    }
    Samples samples;
    Samples attends;
    for (auto _ : state) {
      const Neighbours neighbours;
      repeat(prefill_patience(run), [&] { samples.add(rig.compress_fork()); });
      for (int i = 0; i < (run.smoke ? 1 : 3); ++i) attends.add(rig.attend());
      report_times(state, run, what.name + tail, samples, neighbours);
      state.counters["compress_percent"] = 100 * samples.median() / attends.median();
      state.counters["rows"] = static_cast<double>(what.tokens);
      state.counters["error"] = rig.error();
    }
  });
}

template <Element Q, Element E>
void run_prompt(benchmark::State& state, Run& run, const PrefillCase<E>& what, std::size_t threads) {
  const std::string tail = "/threads:" + std::to_string(threads);
  guarded(state, run, what.name + tail, [&] {
    run.drop_rig();
    PrefillRig<E, Q> rig{what};
    rig.use_threads(threads);
    const std::size_t chunks = what.tokens / what.chunk;
    const std::size_t timed = std::min<std::size_t>(chunks, run.smoke ? 2 : 8);
    const double share = static_cast<double>(chunks) / static_cast<double>(timed);
    const std::size_t rounds = run.smoke ? 1 : 3;
    std::vector<double> passes(rounds);  // seconds for the whole text, by rank of sample
    double flops = 0.0;
    for (auto _ : state) {
      const Neighbours neighbours;
      for (std::size_t i = 0; i < timed; ++i) {
        const std::size_t chunk = (2 * i + 1) * chunks / (2 * timed);
        rig.fill_to(chunk * what.chunk);
        rig.append_chunk(run.smoke);
        if (const auto wrong = rig.verify(run)) {
          return refuse(state, run, message(what.name, tail, ", chunk ", chunk, ": ", *wrong));
        }
        Samples samples;
        for (std::size_t round = 0; round < rounds; ++round) samples.add(rig.attend());
        for (std::size_t round = 0; round < rounds; ++round) {
          const double rank =
              rounds == 1 ? 0.0 : static_cast<double>(round) / static_cast<double>(rounds - 1);
          passes[round] += samples.at(rank) * share;
        }
        flops += rig.flops() * share;
      }
      Samples samples;
      for (const double seconds : passes) samples.add(seconds);
      report_times(state, run, what.name + tail, samples, neighbours);
      report_flops(state, run, threads, samples.median(), flops);
      report_ratio(state, run, what.baseline.empty() ? "" : what.baseline + tail, samples.median());
      state.counters["rows"] = static_cast<double>(what.tokens);
      state.counters["timed_chunks"] = static_cast<double>(timed);
      state.counters["error"] = rig.error();
    }
  });
}

}  // namespace kvpolicy::bench
