// SPDX-License-Identifier: Apache-2.0
//
// Times the attention of a prompt in one layer, in chunks: each chunk attends to all earlier rows
// and to itself (Engine::attend, timed), and is then appended (not timed). A sample is the sum over
// the chunks of one pass; each pass begins with an empty cache.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include <kvpolicy/cuda/kernels/prefill_hopper.cuh>
#include <kvpolicy/cuda/kernels/prefill_tile.cuh>

#include "decode_case.hpp"

namespace kvpolicy::bench {

struct PrefillCase {
  std::string name;
  std::string baseline;
  Plan plan;  ///< for one layer
  std::size_t tokens = 0;
  std::size_t chunk = 0;
};

class PrefillRig {
 public:
  PrefillRig(const PrefillCase& what, Run& run)
      : what_{what},
        run_{run},
        shape_{what.plan.shape()},
        engine_{std::make_shared<Engine>(shape_, gpu::default_memory(), run.stream)},
        queries_{what.chunk * shape_.q_heads * shape_.head_dim, run.stream},
        keys_{what.chunk * shape_.kv_heads * shape_.head_dim, run.stream},
        values_{keys_.count(), run.stream},
        out_{queries_.count(), run.stream} {}

  /// Seconds of a pass. With `checked` the first and the last chunk are also verified.
  double pass(bool checked) {
    Cache cache{what_.plan, {.max_append = std::min(portion_rows, what_.chunk)}, run_.stream, engine_};
    cache.reserve(what_.tokens, run_.stream);
    double seconds = 0.0;
    for (std::size_t done = 0; done < what_.tokens; done += what_.chunk) {
      const std::size_t count = std::min(what_.chunk, what_.tokens - done);
      queries_.randomize(3 * done + 1, run_.stream);
      keys_.randomize(3 * done + 2, run_.stream);
      values_.randomize(3 * done + 3, run_.stream);
      const bool last = done + count == what_.tokens;
      if (checked && (done == 0 || last)) out_.poison(run_.stream);
      seconds += run_.timer->seconds([&] { attend(cache, count); });
      if (checked && (done == 0 || last)) verify(cache, done, count);
      if (!last) append(cache, count);
    }
    return seconds;
  }
  [[nodiscard]] const std::optional<std::string>& wrong() const { return wrong_; }
  [[nodiscard]] double error() const { return error_; }

  /// Floating-point operations of a pass; counted in whole tiles if `tiles`.
  [[nodiscard]] double flops(bool tiles) const {
    bool warpgroups = engine_->uses_warpgroups();
    for (std::size_t head = 0; head < shape_.kv_heads; ++head) {
      warpgroups = warpgroups && !gpu::served_rule(what_.plan, 0, head).is_quantized();
    }
    using Tile = gpu::PrefillShape<128>;
    using HopperTile = gpu::HopperShape<128>;
    const std::size_t query_rows = warpgroups ? HopperTile::query_rows : Tile::query_rows;
    const std::size_t key_rows = warpgroups ? HopperTile::key_rows : Tile::key_rows;
    double pairs = 0.0;
    for (std::size_t done = 0; done < what_.tokens; done += what_.chunk) {
      const std::size_t count = std::min(what_.chunk, what_.tokens - done);
      for (std::size_t head = 0; head < shape_.kv_heads; ++head) {
        const HeadRule settings = gpu::served_rule(what_.plan, 0, head);
        pairs += tiles ? live_tile_pairs(settings, done, count, shape_.queries_per_kv(), query_rows, key_rows)
                       : static_cast<double>(shape_.queries_per_kv()) * visible_pairs(settings, done, count);
      }
    }
    return pairs * flops_of_pair(shape_.head_dim);
  }

 private:
  void attend(const Cache& cache, std::size_t count) const {
    const auto tensor = [&](const Tensor16& rows, std::size_t heads) {
      return gpu::Tensor{.data = reinterpret_cast<std::byte*>(rows.data()),
                         .sequence_stride = 0,
                         .token_stride = static_cast<long long>(heads * shape_.head_dim),
                         .head_stride = static_cast<long long>(shape_.head_dim)};
    };
    gpu::AttendParams params;
    params.heads = cache.device_heads(0);
    params.states = cache.device_state(0);
    params.kv_heads = static_cast<int>(shape_.kv_heads);
    params.group = static_cast<int>(shape_.queries_per_kv());
    params.page_rows = static_cast<int>(cache.options().page_rows);
    params.request = {.queries = static_cast<int>(count), .own_rows = true};
    params.q = tensor(queries_, shape_.q_heads);
    params.k = tensor(keys_, shape_.kv_heads);
    params.v = tensor(values_, shape_.kv_heads);
    params.out = tensor(out_, shape_.q_heads);
    params.scale_log2 = gpu::log2_e / std::sqrt(static_cast<float>(shape_.head_dim));
    engine_->attend(params, /*packs=*/false, cache.tokens() + count, run_.stream);
  }

  void append(Cache& cache, std::size_t count) {
    const std::size_t portion = cache.options().max_append;
    for (std::size_t done = 0; done < count; done += portion) {
      const std::size_t rows = std::min(portion, count - done);
      const auto part = [&](const Tensor16& all) {
        return TensorView<const bfloat16>{all.view(shape_.kv_heads, shape_.head_dim).slice(done, rows)};
      };
      cache.append(0, part(keys_), part(values_), run_.stream);
    }
    cache.commit(run_.stream);
  }

  // Checks the first, the middle and the last query of the chunk, in a head of each kind.
  void verify(const Cache& cache, std::size_t cached, std::size_t count) {
    const std::size_t dim = shape_.head_dim;
    const auto q = download(queries_.data(), count * shape_.q_heads * dim, run_.stream);
    const auto k = download(keys_.data(), count * shape_.kv_heads * dim, run_.stream);
    const auto v = download(values_.data(), count * shape_.kv_heads * dim, run_.stream);
    const auto out = download(out_.data(), q.size(), run_.stream);
    for (const std::size_t head : checked_heads(what_.plan, 0)) {
      const HeadRule settings = gpu::served_rule(what_.plan, 0, head);
      gpu::CachedRows rows = cache.rows(0, head, Read::all, 0, run_.stream);
      add_rows(rows, k, v, shape_.kv_heads, head, dim, count, cached);
      for (const std::size_t token : {std::size_t{0}, count / 2, count - 1}) {
        const Sight sight{.position = static_cast<std::int64_t>(cached + token),
                          .sinks = static_cast<std::int64_t>(settings.sinks),
                          .recent = static_cast<std::int64_t>(settings.recent)};
        const std::size_t q_head = head * shape_.queries_per_kv() + token % shape_.queries_per_kv();
        const std::size_t at = (token * shape_.q_heads + q_head) * dim;
        const double error = relative_error(std::span{out}.subspan(at, dim),
                                            attention(std::span{q}.subspan(at, dim), rows, sight));
        if (!(error <= most_error_exact) && !wrong_) {
          wrong_ = message(what_.name, ": token ", cached + token, ", query head ", q_head, " is off by ",
                           error, ", allowed are ", most_error_exact);
        }
        error_ = std::max(error_, error);
      }
    }
  }

  const PrefillCase& what_;
  Run& run_;
  ModelShape shape_;
  std::shared_ptr<Engine> engine_;
  Tensor16 queries_;  // for one chunk
  Tensor16 keys_;
  Tensor16 values_;
  Tensor16 out_;
  std::optional<std::string> wrong_;
  double error_ = 0.0;
};

inline void run_prefill(benchmark::State& state, Run& run, const PrefillCase& what) {
  guarded(state, run, what.name, [&] {
    PrefillRig rig{what, run};
    rig.pass(/*checked=*/true);  // also warms up
    if (rig.wrong()) return refuse(state, run, *rig.wrong());
    const Samples samples = sample(state, [&] { return rig.pass(/*checked=*/false); });
    report_times(state, run, what.name, samples, 1.0);
    const double seconds = run.seconds[what.name];
    const double exact = rig.flops(false);
    state.counters["flops"] = exact;
    state.counters["TFLOP_per_s"] = exact / seconds * 1e-12;
    state.counters["tiles_TFLOP_per_s"] = rig.flops(true) / seconds * 1e-12;
    if (run.device.flops_per_second > 0) {
      state.counters["percent_of_peak"] = 100 * exact / seconds / run.device.flops_per_second;
      state.counters["limit_us"] = exact / run.device.flops_per_second * 1e6;
    }
    report_ratio(state, run, what.baseline, seconds);
    state.counters["error"] = rig.error();
  });
}

}  // namespace kvpolicy::bench
