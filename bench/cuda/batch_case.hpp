// SPDX-License-Identifier: Apache-2.0
//
// Times one token's attention for many sequences in one launch, and nothing else: the head descriptions
// of many one-layer caches are gathered into one list for Engine::attend, as an engine with caches of its
// own may do. ragged_case.hpp times whole steps of batches.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "decode_case.hpp"

namespace kvpolicy::bench {

struct BatchCase {
  std::string name;
  Plan plan;  ///< for one layer
  std::size_t sequences = 64;
  std::size_t tokens = 0;  ///< in each sequence, the query's own row included
};

class BatchRig {
 public:
  BatchRig(const BatchCase& what, Run& run)
      : what_{what},
        run_{run},
        shape_{what.plan.shape()},
        engine_{std::make_shared<Engine>(shape_, gpu::default_memory(), run.stream)},
        queries_{what.sequences * shape_.q_heads * shape_.head_dim, run.stream},
        keys_{what.sequences * shape_.kv_heads * shape_.head_dim, run.stream},
        values_{keys_.count(), run.stream},
        out_{queries_.count(), run.stream},
        heads_{gpu::allocate(gpu::default_memory(), what.sequences * shape_.kv_heads * sizeof(gpu::HeadView),
                             run.stream)},
        states_{gpu::allocate(gpu::default_memory(), what.sequences * sizeof(gpu::LayerState), run.stream)} {
    queries_.randomize(1U << 20, run.stream);
    keys_.randomize((1U << 20) + 1, run.stream);
    values_.randomize((1U << 20) + 2, run.stream);
    const std::size_t portion = std::min(portion_rows, what.tokens);
    Filler filler{shape_, portion, run.stream};
    for (std::size_t s = 0; s < what.sequences; ++s) {
      Cache& cache =
          caches_.emplace_back(what.plan, gpu::CacheOptions{.max_append = portion}, run.stream, engine_);
      cache.reserve(what.tokens, run.stream);
      filler.fill(cache, 0, what.tokens - 1);
      cache.commit(run.stream);
      const auto gather = [&](auto* to, const auto* from, std::size_t count) {
        gpu::check(cudaMemcpyAsync(to, from, count * sizeof *from, cudaMemcpyDeviceToDevice, run.stream),
                   "cudaMemcpyAsync");
      };
      gather(heads() + s * shape_.kv_heads, cache.device_heads(0), shape_.kv_heads);
      gather(states() + s, cache.device_state(0), 1);
    }
  }

  void attend() const {
    const auto tensor = [](const Tensor16& rows, std::size_t sequences, std::size_t head_dim) {
      const auto of_sequence = static_cast<long long>(rows.count() / sequences);
      return gpu::Tensor{.data = reinterpret_cast<std::byte*>(rows.data()),
                         .sequence_stride = of_sequence,
                         .token_stride = of_sequence,
                         .head_stride = static_cast<long long>(head_dim)};
    };
    gpu::AttendParams params;
    params.heads = heads();
    params.states = states();
    params.sequences = static_cast<int>(what_.sequences);
    params.kv_heads = static_cast<int>(shape_.kv_heads);
    params.group = static_cast<int>(shape_.queries_per_kv());
    params.page_rows = static_cast<int>(caches_.front().options().page_rows);
    params.request = {.queries = 1, .own_rows = true};
    params.q = tensor(queries_, what_.sequences, shape_.head_dim);
    params.k = tensor(keys_, what_.sequences, shape_.head_dim);
    params.v = tensor(values_, what_.sequences, shape_.head_dim);
    params.out = tensor(out_, what_.sequences, shape_.head_dim);
    params.scale_log2 = gpu::log2_e / std::sqrt(static_cast<float>(shape_.head_dim));
    engine_->attend(params, /*packs=*/false, what_.tokens, run_.stream);
  }

  /// Checks the first head of the first sequence, the last head of the last, and one between.
  /// Returns the error, if any.
  [[nodiscard]] std::optional<std::string> verify() {
    out_.poison(run_.stream);
    attend();
    if (const std::size_t nans = out_.nans(run_.stream); nans > 0) {
      return message(what_.name, ": ", nans, " of ", out_.count(), " numbers are NaN, or were not written");
    }
    const std::size_t dim = shape_.head_dim;
    const std::size_t row = shape_.kv_heads * dim;
    const auto q = download(queries_.data(), queries_.count(), run_.stream);
    const auto k = download(keys_.data(), keys_.count(), run_.stream);
    const auto v = download(values_.data(), values_.count(), run_.stream);
    const auto out = download(out_.data(), out_.count(), run_.stream);
    for (const std::size_t s : {std::size_t{0}, what_.sequences / 2, what_.sequences - 1}) {
      const std::size_t head = s == 0 ? 0 : shape_.kv_heads - 1;
      gpu::CachedRows rows = caches_[s].rows(0, head, Read::all, 0, run_.stream);
      add_rows(rows, std::span{k}.subspan(s * row, row), std::span{v}.subspan(s * row, row), shape_.kv_heads,
               head, dim, 1, what_.tokens - 1);
      const std::size_t q_head =
          s * shape_.q_heads + head * shape_.queries_per_kv() + shape_.queries_per_kv() / 2;
      const Sight sight{.position = static_cast<std::int64_t>(what_.tokens) - 1};
      const double error = relative_error(std::span{out}.subspan(q_head * dim, dim),
                                          attention(std::span{q}.subspan(q_head * dim, dim), rows, sight));
      if (!(error <= most_error_exact)) {
        return message(what_.name, ": sequence ", s, ", KV head ", head, " is off by ", error,
                       ", allowed are ", most_error_exact);
      }
      error_ = std::max(error_, error);
    }
    return std::nullopt;
  }
  [[nodiscard]] double error() const { return error_; }

  double seconds() {
    if (!graph_) graph_ = reference::Graph{run_.stream, [&] { attend(); }};
    return run_.timer->seconds([&] { graph_.launch(run_.stream); });
  }

 private:
  [[nodiscard]] gpu::HeadView* heads() const { return reinterpret_cast<gpu::HeadView*>(heads_.get()); }
  [[nodiscard]] gpu::LayerState* states() const { return reinterpret_cast<gpu::LayerState*>(states_.get()); }

  const BatchCase& what_;
  Run& run_;
  ModelShape shape_;
  std::shared_ptr<Engine> engine_;
  std::vector<Cache> caches_;
  Tensor16 queries_;  // [sequences, q_heads, head_dim]
  Tensor16 keys_;     // for the queries' own tokens
  Tensor16 values_;
  Tensor16 out_;
  gpu::DeviceBuffer heads_;   // [sequences, kv_heads]
  gpu::DeviceBuffer states_;  // [sequences]
  double error_ = 0.0;
  reference::Graph graph_;
};

inline void run_batch(benchmark::State& state, Run& run, const BatchCase& what) {
  guarded(state, run, what.name, [&] {
    BatchRig rig{what, run};
    if (const auto wrong = rig.verify()) return refuse(state, run, *wrong);
    for (int i = 0; i < 3; ++i) rig.seconds();
    const Samples samples = sample(state, [&] { return rig.seconds(); });
    report_times(state, run, what.name, samples, 1.0);
    const double bytes = static_cast<double>(what.sequences) *
                         bytes_of({.name = {}, .baseline = {}, .plan = what.plan, .tokens = what.tokens});
    report_bytes(state, run, run.seconds[what.name], bytes);
    state.counters["error"] = rig.error();
  });
}

}  // namespace kvpolicy::bench
