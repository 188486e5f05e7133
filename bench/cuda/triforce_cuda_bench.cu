// SPDX-License-Identifier: Apache-2.0
//
// Times TriForce on a GPU: the shape of Llama-2-7B after 122,880 tokens with a budget of 4,096
// rows, and a draft of Llama-68M's shape over 256 rows, as in the paper (arXiv:2404.11912, tables
// 1, 2 and 4): with the cache on the device and 6 draft tokens, and in pinned host memory with 16.
// Weights are random, and draft tokens are accepted at random at the published rates; everything is
// computed as in real use. The baseline is our own plain decoding over the same cache in the same
// run.
//
//   triforce_cuda_bench --benchmark_out=triforce.json --benchmark_out_format=json
//
// A context that does not fit is skipped and reports the missing memory.
#include <algorithm>
#include <chrono>
#include <memory>
#include <new>
#include <optional>
#include <string>
#include <vector>

#include <kvpolicy/cuda/on_stream.hpp>
#include <kvpolicy/cuda/pinned_memory.hpp>
#include <kvpolicy/speculation/cost_model.hpp>
#include <kvpolicy/triforce.hpp>
#include <reference_model/cuda/language_model.hpp>

#include "bench/triforce/scripted.hpp"
#include "model_case.hpp"
#include "program.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;

using Reader = reference::CudaLlamaReader;
using OnStream = gpu::OnStream<Cache>;
using Clock = std::chrono::steady_clock;

struct Setting {
  std::string name;
  std::size_t context = 0;
  bool offloaded = false;
  std::size_t length = 6;  ///< draft tokens in a verification, as in the paper
};

[[nodiscard]] reference::LlamaConfig draft_config(const reference::LlamaConfig& target, bool smoke) {
  reference::LlamaConfig config = target;
  if (smoke) return config;
  config.hidden = 768;
  config.intermediate = 3072;
  config.layers = 2;
  config.q_heads = config.kv_heads = 6;  // the original has 12 heads of 64, whose rows have the
                                         // same size
  config.windows.assign(config.layers, 0);
  return config;
}

/// Models, and caches that have read all of a text but its last token.
class World {
 public:
  World(Run& run, const Setting& setting)
      : run_{run},
        setting_{setting},
        config_{run.smoke ? smoke_model(llama_2_7b()) : llama_2_7b()},
        target_{reference::CudaLlama::random(config_, {}, 1, run.stream)},
        small_{reference::CudaLlama::random(draft_config(config_, run.smoke), {}, 2, run.stream)} {
    const std::size_t budget = run.smoke ? 64 : 4096;
    const std::size_t portion = run.smoke ? 64 : 1024;
    options_.max_rollback = 32;
    options_.max_append = portion;
    options_.slow_memory = setting.offloaded ? &pinned_ : nullptr;
    const Plan plan{config_.shape(), MeanChunks::Config{.chunk = 8, .budget = budget}};
    if (!setting.offloaded) {
      const std::size_t wanted = page_bytes(plan, options_, setting.context) + spare_bytes(run);
      missing_ = wanted - std::min(wanted, free_bytes(run.stream));
      if (missing_ > 0) return;
    }
    cache_.emplace(filled(Cache{plan, options_, run.stream}, portion));
    gpu::CacheOptions window = options_;
    window.slow_memory = nullptr;
    small_cache_.emplace(
        filled(Cache{Plan{small_.config().shape(), Streaming::Config{.sinks = 16, .recent = 240}}, window,
                     run.stream},
               portion));
    text_.assign(setting.context + 1, 1);
  }

  /// Bytes of device memory that are missing for a text of this length; 0 if it fits.
  [[nodiscard]] std::size_t missing() const { return missing_; }
  [[nodiscard]] std::size_t wanted() const {
    return page_bytes(Plan{config_.shape(), MeanChunks::Config{}}, options_, setting_.context);
  }
  [[nodiscard]] std::size_t cache_bytes() const { return cache_->bytes(); }

  /// Seconds of a token in plain decoding.
  [[nodiscard]] double plain(std::size_t tokens) {
    Cache cache = cache_->fork(run_.stream);
    OnStream on_stream{cache, run_.stream};
    return decode(SpeculativeDecoder{reader_, on_stream, NoDraft{}, fixed(0)}, tokens);
  }
  /// Seconds of a token in speculative decoding; `acceptance` gets that of the target.
  template <unsigned Target, unsigned Middle>
  [[nodiscard]] double speculative(std::size_t tokens, LevelStatistics* statistics) {
    using Small = ModelDraft<Reader, OnStream>;
    using Draft = SelectedDraft<Reader, OnStream, Small, Scripted<Middle>>;
    Cache cache = cache_->fork(run_.stream);
    Cache small_cache = small_cache_->fork(run_.stream);
    OnStream on_stream{cache, run_.stream};
    OnStream small_on_stream{small_cache, run_.stream};
    const auto read = std::span<const int>{text_}.first(setting_.context);
    return decode(
        SpeculativeDecoder<Reader, OnStream, Draft, Scripted<Target>>{
            reader_, on_stream,
            Draft{reader_,
                  on_stream,
                  Small{small_reader_, small_on_stream, {}, read},
                  {.length = 1, .adapt = false}},
            fixed(setting_.length)},
        tokens, statistics);
  }

 private:
  [[nodiscard]] Cache filled(Cache cache, std::size_t portion) const {
    Filler filler{cache.plan().shape(), portion, run_.stream};
    cache.reserve(setting_.context + 64, run_.stream);
    for (std::size_t layer = 0; layer < cache.plan().shape().layers; ++layer) {
      filler.fill(cache, layer, setting_.context);
    }
    cache.commit(run_.stream);
    gpu::check(cudaStreamSynchronize(run_.stream), "cudaStreamSynchronize");
    return cache;
  }
  [[nodiscard]] static SpeculationOptions fixed(std::size_t length) {
    SpeculationOptions options;
    options.sampling.temperature = 1.0F;
    options.length = length;
    options.adapt = false;
    options.refresh_selection.below_acceptance = 0.0;
    return options;
  }
  template <class Decoder>
  [[nodiscard]] double decode(Decoder decoder, std::size_t tokens, LevelStatistics* statistics = nullptr) {
    decoder.continue_text(text_);
    static_cast<void>(decoder.step());  // chooses the chunks, and makes libraries load their
                                        // kernels
    static_cast<void>(decoder.step());
    const std::size_t before = decoder.text().size();
    const LevelStatistics counted = decoder.statistics();
    const auto start = Clock::now();
    static_cast<void>(decoder.generate(tokens));
    const std::chrono::duration<double> passed = Clock::now() - start;
    if (statistics != nullptr) *statistics = since(counted, decoder.statistics());
    return passed.count() / static_cast<double>(decoder.text().size() - before);
  }

  Run& run_;
  Setting setting_;
  gpu::PinnedMemory pinned_;
  gpu::CacheOptions options_;
  reference::LlamaConfig config_;
  reference::CudaLlama target_;
  reference::CudaLlama small_;
  Reader reader_{target_};
  Reader small_reader_{small_};
  std::optional<Cache> cache_;
  std::optional<Cache> small_cache_;
  std::vector<int> text_;
  std::size_t missing_ = 0;
};

class Cases {
 public:
  explicit Cases(Run& run) : run_{run} {
    const std::size_t full = run.smoke ? 200 : 122880;
    for (const Setting& setting :
         {Setting{"device", full}, Setting{"device-half", full / 2}, Setting{"offloaded", full, true, 16}}) {
      // The paper's acceptance at temperature 0, 0.6 and 1.
      add<923>(setting);
      add<914>(setting);
      add<900>(setting);
    }
  }

 private:
  template <unsigned Target>
  void add(const Setting& setting) {
    const std::string name = "triforce/" + setting.name + "/" + std::to_string(setting.context) +
                             "/acceptance:" + std::to_string(Target);
    const std::size_t samples = run_.smoke ? 1 : 5;
    add_case(name, samples, benchmark::kMillisecond, [=, this](benchmark::State& state) {
      guarded(state, run_, name, [&] {
        if (world_name_ != setting.name) {
          world_.reset();
          world_ = std::make_unique<World>(run_, setting);
          world_name_ = setting.name;
        }
        if (world_->missing() > 0) {
          return skip_unfitting(state, run_, world_->wanted(), world_->missing());
        }
        const std::size_t tokens = run_.smoke ? 4 : setting.offloaded ? 48 : 128;
        Samples plain;
        Samples ours;
        Samples ratios;
        LevelStatistics statistics;
        for (auto _ : state) {
          const double one = world_->plain(std::max<std::size_t>(tokens / 8, 2));
          const double many = world_->speculative<Target, small_draft_per_mille>(tokens, &statistics);
          plain.add(one);
          ours.add(many);
          ratios.add(one / many);
          state.SetIterationTime(many);
        }
        state.counters["speedup"] = ratios.median();
        state.counters["speedup_min"] = ratios.at(0.0);
        state.counters["speedup_max"] = ratios.at(1.0);
        state.counters["plain_ms"] = plain.median() * 1e3;
        state.counters["ms"] = ours.median() * 1e3;
        state.counters["acceptance"] = statistics.acceptance();
        state.counters["tokens_per_verification"] = statistics.tokens_per_verification();
        state.counters["kv_GiB"] = gibibytes(world_->cache_bytes());
      });
    });
  }

  Run& run_;
  std::unique_ptr<World> world_;
  std::string world_name_;
};

constexpr std::string_view usage = R"(usage: triforce_cuda_bench [options] [--benchmark_...]

Times TriForce's hierarchy on Llama-2-7B's shape with random weights after 122,880 tokens, with the
cache on the device and in pinned host memory. Draft tokens are accepted at random at published rates.

  --smoke       runs every case in a small size
  --benchmark_filter=REGEX  only these cases (their names: --benchmark_list_tests)
  --benchmark_out=FILE --benchmark_out_format=json  results as JSON
)";

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, usage, /*flushes=*/false, {},
                     [](Run& run) { return std::make_unique<Cases>(run); });
}
