// SPDX-License-Identifier: Apache-2.0
//
// Shared by the benches of whole models: the two shapes of DuoAttention's figures with random
// weights, caches that grow from context to context by appended random rows, and the bytes that a
// step holds and must read. The contents of a cache do not change its time, so no prompt is
// computed.
#pragma once

#include <array>
#include <memory>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include <reference_model/cuda/run.hpp>

#include "decode_case.hpp"

namespace kvpolicy::bench {

[[nodiscard]] inline reference::LlamaConfig model_config(std::size_t hidden, std::size_t intermediate,
                                                         std::size_t kv_heads, std::size_t vocabulary) {
  reference::LlamaConfig config;
  config.vocabulary = vocabulary;
  config.hidden = hidden;
  config.intermediate = intermediate;
  config.layers = 32;
  config.q_heads = 32;
  config.kv_heads = kv_heads;
  config.head_dim = 128;
  config.max_positions = std::size_t{1} << 23;
  config.windows.assign(config.layers, 0);
  return config;
}
[[nodiscard]] inline reference::LlamaConfig llama_3_8b() { return model_config(4096, 14336, 8, 128256); }
[[nodiscard]] inline reference::LlamaConfig llama_2_7b() { return model_config(4096, 11008, 32, 32000); }
/// The same kind of model in a size for the emulation.
[[nodiscard]] inline reference::LlamaConfig smoke_model(reference::LlamaConfig config) {
  config.hidden = 32;
  config.intermediate = 48;
  config.vocabulary = 40;
  config.layers = 2;
  config.q_heads = 8;
  config.kv_heads = config.kv_heads / 4;
  config.windows.assign(config.layers, 0);
  return config;
}

/// A plan whose layers all have `retrieval` retrieval heads first, followed by streaming heads.
template <class Retrieval>
[[nodiscard]] Plan duo_plan(const ModelShape& shape, double share, const Retrieval& retrieval,
                            const Streaming::Config& streaming) {
  Plan plan{shape, retrieval};
  const auto kept = static_cast<std::size_t>(share * static_cast<double>(shape.kv_heads) + 0.5);
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = kept; head < shape.kv_heads; ++head) plan.set(layer, head, streaming);
  }
  return plan;
}

/// Bytes of the pages of a cache, computed before the cache is made.
[[nodiscard]] inline std::size_t page_bytes(const Plan& plan, const gpu::CacheOptions& options,
                                            std::size_t tokens) {
  const ModelShape& shape = plan.shape();
  std::size_t bytes = 0;
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < shape.kv_heads; ++head) {
      const gpu::HeadGeometry geometry{
          gpu::served_rule(plan, layer, head),
          {.head_dim = shape.head_dim, .page_rows = options.page_rows, .tail_rows = options.tail_rows()},
          false};
      bytes += geometry.bytes(tokens);
    }
  }
  return bytes;
}

/// Device memory that the program can still allocate. Memory that was freed but is kept by the pool
/// is returned first.
[[nodiscard]] inline std::size_t free_bytes(cudaStream_t stream) {
  gpu::check(cudaStreamSynchronize(stream), "cudaStreamSynchronize");
  std::size_t available = 0;
  std::size_t total = 0;
  gpu::check(cudaMemGetInfo(&available, &total), "cudaMemGetInfo");
  return available;
}
/// Memory that is kept free for page tables, descriptions, and the driver's needs for launches and
/// graphs.
[[nodiscard]] inline std::size_t spare_bytes(const Run& run) { return run.smoke ? 0 : std::size_t{3} << 28; }

[[nodiscard]] inline double gibibytes(std::size_t bytes) { return static_cast<double>(bytes) / 0x1p30; }
[[nodiscard]] inline std::string one_decimal(double number) {
  char text[32];
  std::snprintf(text, sizeof text, "%.1f", number);
  return text;
}

/// A model and the cache of one plan, which are kept from case to case.
class ModelRig {
 public:
  explicit ModelRig(Run& run) : run_{run} {}

  /// `max_append`: rows of one append while filling; large ones make the rings of windows larger.
  void use(const std::string& name, const reference::LlamaConfig& config, reference::WeightFormat weights,
           const std::string& policy, const Plan& plan, std::size_t max_append) {
    if (name != model_name_) {
      drop_cache();
      model_.reset();
      wait();
      model_.emplace(reference::CudaLlama::random(config, {.weights = weights}, 1, run_.stream));
      model_->reserve(1, 1, run_.stream);
      model_name_ = name;
    }
    if (policy == policy_ && cache_) return;
    drop_cache();
    cache_.emplace(plan, gpu::CacheOptions{.max_append = max_append}, run_.stream);
    filler_.emplace(plan.shape(), max_append, run_.stream);
    policy_ = policy;
  }
  void drop_cache() {
    cache_.reset();
    filler_.reset();
    policy_.clear();
    wait();
  }
  [[nodiscard]] reference::CudaLlama& model() { return *model_; }
  [[nodiscard]] Cache& cache() { return *cache_; }

  /// Bytes that are missing for a text of `tokens`; 0 if it fits.
  [[nodiscard]] std::size_t missing(std::size_t tokens) const {
    const std::size_t wanted = page_bytes(cache_->plan(), cache_->options(), tokens) + spare_bytes(run_);
    const std::size_t there = cache_->bytes() + free_bytes(run_.stream);
    return wanted - std::min(wanted, there);
  }
  /// The longest text that fits.
  [[nodiscard]] std::size_t longest() const {
    std::size_t tokens = 0;
    for (std::size_t step = std::size_t{1} << 28; step > 0; step /= 2) {
      if (missing(tokens + step) == 0) tokens += step;
    }
    return tokens;
  }
  /// Appends rows until the text has `tokens`, with room for `more`. @throws std::bad_alloc
  void fill(std::size_t tokens, std::size_t more) {
    cache_->reserve(tokens + more, run_.stream);
    wait();
    for (std::size_t layer = 0; layer < cache_->plan().shape().layers; ++layer) {
      filler_->fill(*cache_, layer, tokens);
    }
    cache_->commit(run_.stream);
    wait();
  }

  /// Bytes of device memory that this step needs.
  [[nodiscard]] std::size_t held_bytes() const {
    return model_->weight_bytes() + model_->activation_bytes() + cache_->bytes() + cache_->overhead_bytes() +
           cache_->engine()->workspace_bytes();
  }
  /// Bytes that a decode step must read: cached rows, and all weights except the embedding, of
  /// which it reads one row.
  [[nodiscard]] double step_bytes() const {
    const reference::LlamaConfig& config = model_->config();
    const double weights = static_cast<double>(model_->weight_bytes()) -
                           static_cast<double>(config.vocabulary * config.hidden * sizeof(bfloat16));
    return weights +
           bytes_of({.name = {}, .baseline = {}, .plan = cache_->plan(), .tokens = cache_->tokens() + 1});
  }

  /// Times decode steps; each adds one token to the text.
  void time_steps(benchmark::State& state, const std::string& name, const std::string& baseline, bool graph) {
    model_->set_tokens(std::array{1}, cache_->tokens(), run_.stream);
    reference::Decoder<Cache> decoder{*model_, *cache_, {.graph = graph}, run_.stream};
    const double bytes = step_bytes();
    const std::size_t context = cache_->tokens();
    decoder.run(run_.smoke ? 2 : 5);
    Samples samples;
    for (auto _ : state) {
      const double seconds = run_.timer->seconds([&] { decoder.run(1); });
      state.SetIterationTime(seconds);
      samples.add(seconds);
    }
    static_cast<void>(model_->take_choices(run_.stream));  // throws if a logit was NaN
    report_times(state, run_, name, samples, 1.0);
    report_bytes(state, run_, run_.seconds[name], bytes);
    report_ratio(state, run_, baseline, run_.seconds[name]);
    state.counters["context"] = static_cast<double>(context);
    state.counters["kv_GiB"] = gibibytes(cache_->bytes());
    state.counters["held_GiB"] = gibibytes(held_bytes());
    state.counters["ms_per_token"] = run_.seconds[name] * 1e3;
  }

 private:
  void wait() const { gpu::check(cudaStreamSynchronize(run_.stream), "cudaStreamSynchronize"); }

  Run& run_;
  std::string model_name_;
  std::string policy_;
  std::optional<reference::CudaLlama> model_;
  std::optional<Cache> cache_;
  std::optional<Filler> filler_;
};

/// Reports which case does not fit, and how much memory is missing.
inline void skip_unfitting(benchmark::State& state, const Run& run, std::size_t wanted, std::size_t missing) {
  const std::string why = "does not fit (needs " + one_decimal(gibibytes(wanted)) + " GiB for the cache, " +
                          one_decimal(gibibytes(missing)) + " GiB more than there are of " +
                          one_decimal(gibibytes(run.device.memory_bytes)) + " GiB)";
  state.SkipWithError(why.c_str());
}

}  // namespace kvpolicy::bench
