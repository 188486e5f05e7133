// SPDX-License-Identifier: Apache-2.0
//
// Times one token's attention over caches that were filled by `append`. The appended row stays
// tentative, so every launch reads the same rows and changes nothing. Small cases time several
// layers one after another, each with rows of its own, so that they measure the launches of a step
// and not the gaps around a single launch.
#pragma once

#include <cstdio>
#include <exception>
#include <functional>
#include <new>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <reference_model/cuda/graph.hpp>

#include "verify.hpp"
#include "workload.hpp"

namespace kvpolicy::bench {

struct DecodeCase {
  std::string name;
  std::string baseline;  ///< the case to compute a ratio to; empty: none
  Plan plan;
  std::size_t tokens = 0;  ///< with the query's own row
  Read read = Read::all;
  bool refresh = false;  ///< every launch chooses new chunks
  gpu::Launches launches = gpu::Launches::joint;
};

/// The bytes that the layers of a small case read together.
inline constexpr double bytes_of_sample = 256e6;
inline constexpr std::size_t most_layers = 16;

[[nodiscard]] inline double bytes_of_layer(const DecodeCase& what, std::size_t layer) {
  const ModelShape& shape = what.plan.shape();
  double bytes = 0.0;
  for (std::size_t head = 0; head < shape.kv_heads; ++head) {
    const HeadRule settings = gpu::served_rule(what.plan, layer, head);
    bytes += decode_reads(settings, what.tokens, what.read == Read::selected, what.refresh)
                 .bytes(settings, shape.head_dim);
  }
  return bytes;
}
[[nodiscard]] inline double bytes_of(const DecodeCase& what) {
  double bytes = 0.0;
  for (std::size_t l = 0; l < what.plan.shape().layers; ++l) bytes += bytes_of_layer(what, l);
  return bytes;
}

/// The heads of a layer that are checked: the first, the last, and the first head of every other
/// kind.
[[nodiscard]] inline std::vector<std::size_t> checked_heads(const Plan& plan, std::size_t layer) {
  const std::size_t count = plan.shape().kv_heads;
  std::vector<std::size_t> heads{0};
  for (std::size_t head = 1; head < count; ++head) {
    const bool other = plan.at(layer, head) != plan.at(layer, head - 1);
    if (other || head + 1 == count) heads.push_back(head);
  }
  if (heads.size() > 3) heads = {heads[0], heads[1], heads.back()};
  return heads;
}
/// The first layer with heads of several kinds, or else the first layer.
[[nodiscard]] inline std::size_t checked_layer(const Plan& plan) {
  for (std::size_t layer = 0; layer < plan.shape().layers; ++layer) {
    if (plan.at(layer, 0) != plan.at(layer, plan.shape().kv_heads - 1)) return layer;
  }
  return 0;
}

/// Fails the whole run of the program, and reports the error.
inline void refuse(benchmark::State& state, Run& run, const std::string& why) {
  run.failed = true;
  std::fprintf(stderr, "wrong: %s\n", why.c_str());
  state.SkipWithError(why.c_str());
}

/// A filled cache, its queries and the graph of its step.
class DecodeRig {
 public:
  DecodeRig(const DecodeCase& what, Run& run)
      : what_{what},
        run_{run},
        shape_{what.plan.shape()},
        portion_{std::min(portion_rows, what.tokens)},
        cache_{what.plan, {.max_append = portion_, .launches = what.launches}, run.stream},
        queries_{shape_.layers * shape_.q_heads * shape_.head_dim, run.stream},
        out_{queries_.count(), run.stream},
        layer_{checked_layer(what.plan)} {
    cache_.reserve(what.tokens, run.stream);
    queries_.randomize(1U << 20, run.stream);
    Filler filler{shape_, portion_, run.stream};
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      filler.fill(cache_, layer, what.tokens - 1);
    }
    cache_.commit(run.stream);
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      filler.fill(cache_, layer, what.tokens);
    }
    if (what.read == Read::selected) attend(/*refresh=*/true);
  }

  /// Attends in all layers once.
  void attend(bool refresh) {
    for (std::size_t layer = 0; layer < shape_.layers; ++layer) {
      cache_.attend(layer, TensorView<const bfloat16>{of_layer(queries_, layer)}, of_layer(out_, layer),
                    {.read = what_.read, .refresh_selection = refresh}, run_.stream);
    }
  }

  /// Checks a first launch. Returns the error, if any.
  [[nodiscard]] std::optional<std::string> verify() {
    out_.poison(run_.stream);
    attend(what_.refresh);
    if (const std::size_t nans = out_.nans(run_.stream); nans > 0) {
      return message(what_.name, ": ", nans, " of ", out_.count(), " numbers are NaN, or were not written");
    }
    const std::size_t dim = shape_.head_dim;
    const std::vector<bfloat16> q =
        download(of_layer(queries_, layer_).data, shape_.q_heads * dim, run_.stream);
    const std::vector<bfloat16> out = download(of_layer(out_, layer_).data, q.size(), run_.stream);
    for (const std::size_t head : checked_heads(what_.plan, layer_)) {
      const HeadRule settings = gpu::served_rule(what_.plan, layer_, head);
      const gpu::CachedRows rows = cache_.rows(layer_, head, what_.read, /*appended=*/1, run_.stream);
      const HeadReads reads =
          decode_reads(settings, what_.tokens, what_.read == Read::selected, what_.refresh);
      const auto packed = static_cast<std::size_t>(std::ranges::count(rows.quantized, true));
      if (rows.positions.size() != reads.exact_rows + reads.packed_rows || packed != reads.packed_rows) {
        return message(what_.name, ": KV head ", head, " reads ", rows.positions.size(), " rows, ", packed,
                       " of them quantised; counted were ", reads.exact_rows + reads.packed_rows, " and ",
                       reads.packed_rows);
      }
      const Sight sight{.position = static_cast<std::int64_t>(what_.tokens) - 1};
      const double most = packed > 0 ? most_error_packed : most_error_exact;
      for (const std::size_t member : {std::size_t{0}, shape_.queries_per_kv() - 1}) {
        const std::size_t at = (head * shape_.queries_per_kv() + member) * dim;
        const double error = relative_error(std::span{out}.subspan(at, dim),
                                            attention(std::span{q}.subspan(at, dim), rows, sight));
        if (!(error <= most)) {
          return message(what_.name, ": query head ", head * shape_.queries_per_kv() + member, " of layer ",
                         layer_, " is off by ", error, ", allowed are ", most);
        }
        error_ = std::max(error_, error);
      }
    }
    return std::nullopt;
  }
  /// The largest relative error that `verify` found.
  [[nodiscard]] double error() const { return error_; }

  double seconds() {
    if (!graph_) graph_ = reference::Graph{run_.stream, [&] { attend(what_.refresh); }};
    return run_.timer->seconds([&] { graph_.launch(run_.stream); });
  }

 private:
  [[nodiscard]] TensorView<bfloat16> of_layer(const Tensor16& rows, std::size_t layer) const {
    return {rows.data() + layer * shape_.q_heads * shape_.head_dim, 1, shape_.q_heads, shape_.head_dim};
  }

  const DecodeCase& what_;
  Run& run_;
  ModelShape shape_;
  std::size_t portion_;
  Cache cache_;
  Tensor16 queries_;  // [layers, q_heads, head_dim]
  Tensor16 out_;
  std::size_t layer_;
  double error_ = 0.0;
  reference::Graph graph_;
};

/// Runs `body`; an exception makes the case a skipped one.
template <class Body>
void guarded(benchmark::State& state, Run& run, const std::string& name, Body body) {
  try {
    body();
  } catch (const std::bad_alloc&) {
    static_cast<void>(cudaGetLastError());
    state.SkipWithError("does not fit in this device's memory");
  } catch (const std::exception& error) {
    refuse(state, run, name + ": " + error.what());
  }
  static_cast<void>(cudaStreamSynchronize(run.stream));  // frees memory before the next case
}

inline void run_decode(benchmark::State& state, Run& run, const DecodeCase& what) {
  guarded(state, run, what.name, [&] {
    DecodeRig rig{what, run};
    if (const auto wrong = rig.verify()) return refuse(state, run, *wrong);
    for (int i = 0; i < 3; ++i) rig.seconds();
    const Samples samples = sample(state, [&] { return rig.seconds(); });
    const auto layers = static_cast<double>(what.plan.shape().layers);
    report_times(state, run, what.name, samples, layers);
    const double seconds = run.seconds[what.name];
    report_bytes(state, run, seconds, bytes_of(what) / layers);
    report_ratio(state, run, what.baseline, seconds);
    state.counters["error"] = rig.error();
  });
}

}  // namespace kvpolicy::bench
