// SPDX-License-Identifier: Apache-2.0
//
// Times a layer's step of many sequences: one call for all of them (Batch), beside one call for each. Both are
// sampled in turn on the same caches, so that a change of the machine's speed concerns both.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <numeric>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/batch.hpp>

#include "verify.hpp"
#include "workload.hpp"

namespace kvpolicy::bench {

struct BatchCase {
  std::string name;
  /// The plan of one of the sequences.
  std::function<HeadPlan<bfloat16>(std::size_t layers, std::size_t sequence)> plan;
  std::size_t sequences = 8;
  std::size_t tokens = 0;  ///< of each sequence at the first step
  std::size_t prompt = 0;  ///< tokens of a prompt's part that the last sequence brings instead of one
};

/// Filled caches.
class BatchRig {
 public:
  BatchRig(const BatchCase& what, const Run& run)
      : batch_{Engine{}},
        numbers_{portion_rows * 8 * 128},
        queries_{(portion_rows + what.sequences) * 32 * 128} {
    const std::size_t layers = layers_of(what, run);
    indptr_.push_back(0);
    for (std::size_t i = 0; i < what.sequences; ++i) {
      caches_.emplace_back(what.plan(layers, i), CacheOptions{.max_append = portion_rows, .memory = &memory_},
                           Engine{});
      for (std::size_t layer = 0; layer < layers; ++layer) fill(caches_.back(), numbers_, layer, what.tokens);
      caches_.back().commit();
      const bool reads = what.prompt > 0 && i + 1 == what.sequences;
      indptr_.push_back(indptr_.back() + static_cast<std::int32_t>(reads ? what.prompt : 1));
    }
    for (auto& cache : caches_) sequences_.push_back({&cache});
    out_.resize(tokens() * shape().q_heads * shape().head_dim);
  }

  [[nodiscard]] const ModelShape& shape() const { return caches_.front().plan().shape(); }
  void use_threads(std::size_t threads) {
    for (auto& cache : caches_) cache.engine() = Engine{pool_of(threads)};
    batch_.engine() = Engine{pool_of(threads)};
  }
  /// Tokens of a call.
  [[nodiscard]] std::size_t tokens() const { return static_cast<std::size_t>(indptr_.back()); }

  /// Whether both ways say the same, bit for bit, in this layer. Returns the error, if any.
  [[nodiscard]] std::optional<std::string> verify(const Run& run, std::size_t layer) {
    const Tensors given = draw();
    std::vector<Cache<bfloat16>> forks;
    for (const auto& cache : caches_) forks.push_back(cache.fork());
    poison(out_);
    call_each(forks, layer, given);
    std::vector<float> expected = out_;
    poison(out_);
    if (!call_batch(layer, given)) return "a sequence was left out";
    spoil_output(run, out_);
    for (std::size_t i = 0; i < out_.size(); ++i) {
      // Written so that NaN fails.
      if (!(out_[i] == expected[i]))
        return message("number ", i, " is ", out_[i], ", alone it is ", expected[i]);
    }
    return std::nullopt;
  }

  struct Times {
    double batch, each;
  };
  /// A step of the next layer in one call, and one of the layer after it in a call for each sequence.
  Times sample() {
    const Tensors given = draw();
    Times times{};
    const std::size_t first = next_layer();
    times.batch = seconds_of([&] { call_batch(first, given); });
    const std::size_t second = next_layer();
    times.each = seconds_of([&] { call_each(caches_, second, given); });
    benchmark::DoNotOptimize(out_.data());
    return times;
  }

  /// Bytes of rows that a step of a layer reads, as a mean over the layers.
  [[nodiscard]] double bytes() const {
    double total = 0.0;
    for (const auto& cache : caches_) {
      for (std::size_t layer = 0; layer < shape().layers; ++layer) {
        total += layer_bytes(cache.plan(), layer, cache.tokens(layer), {});
      }
    }
    return total / static_cast<double>(shape().layers);
  }

 private:
  struct Tensors {
    TensorView<const float> q;
    TensorView<const bfloat16> k, v;
  };

  // So many layers that none is still in the processor's caches when its turn comes again.
  [[nodiscard]] static std::size_t layers_of(const BatchCase& what, const Run& run) {
    double read = 0.0, held = 0.0;
    for (std::size_t i = 0; i < what.sequences; ++i) {
      const HeadPlan<bfloat16> one = what.plan(1, i);
      read += layer_bytes(one, 0, what.tokens, {});
      held += static_cast<double>(one.memory(what.tokens, {}, false).total());
    }
    const double wanted = std::ceil(run.cold_bytes() / read);
    const double room = std::floor(static_cast<double>(run.memory_bytes) / held);
    return 2 * static_cast<std::size_t>(std::clamp(std::min(wanted, room) / 2, 1.0, 32.0));
  }

  [[nodiscard]] std::size_t next_layer() { return std::exchange(next_, (next_ + 1) % shape().layers); }

  [[nodiscard]] Tensors draw() {
    return {queries_.tensor(tokens(), shape().q_heads, shape().head_dim),
            numbers_.tensor(tokens(), shape().kv_heads, shape().head_dim),
            numbers_.tensor(tokens(), shape().kv_heads, shape().head_dim)};
  }
  [[nodiscard]] TensorView<float> out() { return {out_.data(), tokens(), shape().q_heads, shape().head_dim}; }

  bool call_batch(std::size_t layer, const Tensors& given) {
    return batch_.step(layer, sequences_, indptr_, given.q, given.k, given.v, out()).empty();
  }
  void call_each(std::vector<Cache<bfloat16>>& caches, std::size_t layer, const Tensors& given) {
    for (std::size_t i = 0; i < caches.size(); ++i) {
      const auto first = static_cast<std::size_t>(indptr_[i]);
      const auto count = static_cast<std::size_t>(indptr_[i + 1]) - first;
      caches[i].step(layer, given.q.slice(first, count), given.k.slice(first, count),
                     given.v.slice(first, count), out().slice(first, count));
    }
  }

  cpu::HugePages memory_;
  std::vector<Cache<bfloat16>> caches_;
  std::vector<BatchSequence<Cache<bfloat16>>> sequences_;
  std::vector<std::int32_t> indptr_;
  cpu::Batch<bfloat16, Engine> batch_;
  Numbers<bfloat16> numbers_;
  Numbers<float> queries_;
  std::vector<float> out_;
  std::size_t next_ = 0;
};

inline void run_batch(benchmark::State& state, Run& run, const BatchCase& what, std::size_t threads) {
  const std::string name = what.name + "/threads:" + std::to_string(threads);
  guarded(state, run, name, [&] {
    BatchRig& rig = run.rig<BatchRig>(what.name, [&] { return new BatchRig{what, run}; });
    rig.use_threads(threads);
    for (std::size_t layer = 0; layer < (run.smoke ? rig.shape().layers : 1); ++layer) {
      if (const auto wrong = rig.verify(run, layer)) return refuse(state, run, message(name, ": ", *wrong));
    }
    Samples batches, each, ratios;
    for (auto _ : state) {
      const Neighbours neighbours;
      for (int i = 0; i < 3; ++i) static_cast<void>(rig.sample());
      repeat(run.patience(), [&] {
        const BatchRig::Times times = rig.sample();
        batches.add(times.batch);
        each.add(times.each);
        ratios.add(times.each / times.batch);
      });
      report_times(state, run, name, batches, neighbours);
      report_bytes(state, run.reading(threads, run.smoke ? 1 : 2), batches.median(), rig.bytes());
      state.counters["ms_one_by_one"] = each.median() * 1e3;
      state.counters["speedup"] = ratios.median();
      state.counters["speedup_p10"] = ratios.at(0.1);
      state.counters["speedup_p90"] = ratios.at(0.9);
      state.counters["tokens_per_s"] = static_cast<double>(rig.tokens()) / batches.median();
    }
  });
}

}  // namespace kvpolicy::bench
