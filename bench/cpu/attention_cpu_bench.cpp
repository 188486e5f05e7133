// SPDX-License-Identifier: Apache-2.0
//
// Times attention of one layer on the CPU under every policy: decode over 4 Ki to 256 Ki rows,
// prefill in chunks, and the added cost of quantising, appending, compressing and selecting. Each
// case is checked against double precision before it is timed. Caches are cold, and each number is
// printed beside the limits of the machine, measured in the same run: bytes read, or multiply-adds.
//
//   attention_cpu_bench --json ours.json
//   attention_cpu_bench --filter 'decode/int4/.*/64Ki'
//
// docs/performance.md explains the numbers and the goals; ./scripts/bench builds and runs this
// program. With --smoke the same cases run in small sizes, verified and hardly timed (ctest -L
// bench); --spoil output|rows|silence falsifies every case, to test that the check finds it.
#include <cstddef>
#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include <kvpolicy/io/head_scores.hpp>
#include <kvpolicy/io/low_bits.hpp>
#include <kvpolicy/plan/headkv_budgets.hpp>

#include "decode_case.hpp"
#include "headkv_sample.hpp"
#include "prefill_case.hpp"
#include "program.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;

constexpr std::size_t head_dim = 128;
constexpr std::size_t Ki = 1024;

// Query and KV heads, written as in the names of cases.
struct Heads {
  std::size_t q = 32;
  std::size_t kv = 8;
  [[nodiscard]] std::string name() const { return std::to_string(q) + "x" + std::to_string(kv); }
};

[[nodiscard]] std::string tokens_name(std::size_t tokens) {
  return tokens % Ki == 0 ? std::to_string(tokens / Ki) + "Ki" : std::to_string(tokens);
}

class Cases {
 public:
  Cases(Run& run, CaseList& list, const Options& options)
      : run_{run}, list_{list}, threads_{options.threads}, scores_{sample_scores()} {
    if (!options.scores.empty()) scores_ = io::load_head_scores(options.scores);
    for (const Heads heads : {Heads{32, 8}, Heads{32, 32}}) {
      if (run_.quick && heads.kv == 32) continue;
      for (const std::size_t tokens : {4 * Ki, 16 * Ki, 64 * Ki, 256 * Ki}) {
        if (run_.quick && tokens != 16 * Ki) continue;
        if (run_.smoke && tokens != 4 * Ki) continue;
        decode(heads, tokens);
      }
    }
    streaming();
    for (const Heads heads : {Heads{32, 8}, Heads{32, 32}}) {
      if (run_.quick && heads.kv == 32) continue;
      for (const std::size_t tokens : {4 * Ki, 16 * Ki, 64 * Ki}) {
        if ((run_.quick || run_.smoke) && tokens != 4 * Ki) continue;
        if (heads.kv == 32 && tokens > 16 * Ki) continue;
        prefill(heads, tokens);
      }
    }
    compress();
    prompt();
  }

 private:
  // ---- sizes: a smoke run uses small ones of the same kind

  [[nodiscard]] Heads scaled(Heads heads) const {
    return run_.smoke ? Heads{heads.q / 4, heads.kv / 4} : heads;
  }
  [[nodiscard]] std::size_t scaled(std::size_t tokens) const {
    return run_.smoke ? 300 + tokens % 7 : tokens;
  }
  [[nodiscard]] std::size_t chunk() const { return run_.smoke ? 70 : portion_rows; }
  [[nodiscard]] std::size_t budget() const { return run_.smoke ? 128 : 4096; }
  [[nodiscard]] ModelShape shape(Heads heads, std::size_t layers = 1) const {
    return {.layers = layers, .q_heads = scaled(heads).q, .kv_heads = scaled(heads).kv, .head_dim = head_dim};
  }
  [[nodiscard]] Streaming::Config window() const {
    return run_.smoke ? Streaming::Config{.sinks = 16, .recent = 40}
                      : Streaming::Config{.sinks = 64, .recent = 256};
  }
  [[nodiscard]] std::size_t residual() const { return run_.smoke ? 64 : 128; }
  // Groups of 0 numbers: a row's keys or values share a scale, or 32 keys of a channel do.
  template <class Policy>
  [[nodiscard]] typename Policy::Config quantized(std::size_t bits, std::size_t key_group = 0,
                                                  std::size_t value_group = 0) const {
    return {.storage = {
                .bits = bits, .key_group = key_group, .value_group = value_group, .residual = residual()}};
  }

  template <class Config>
  [[nodiscard]] static Config rotated(Config config) {
    config.storage.key_hadamard = config.storage.value_hadamard = true;
    return config;
  }

  // ---- plans of one layer, or of several equal layers

  template <class Config>
  [[nodiscard]] std::function<HeadPlan<bfloat16>(std::size_t)> uniform(Heads heads,
                                                                       const Config& config) const {
    return [own = shape(heads), config](std::size_t layers) {
      ModelShape all = own;
      all.layers = layers;
      return HeadPlan<bfloat16>{all, config};
    };
  }
  // What a precision's name stands for in plans.
  [[nodiscard]] HeadSettings<bfloat16> named(std::string_view precision, Heads heads) const {
    return LowBitFormat::of_text(io::low_bits_named(precision), shape(heads), residual()).head<bfloat16>();
  }
  // The same, with normal numbers for values.
  [[nodiscard]] HeadSettings<bfloat16> normal_values(std::string_view precision, Heads heads) const {
    return LowBitFormat::of_text(io::low_bits_named(precision), shape(heads), residual())
        .with_normal(NormalCodes::values)
        .head<bfloat16>();
  }
  // Half of the heads of a layer read every row, the others sinks and a window.
  [[nodiscard]] std::function<HeadPlan<bfloat16>(std::size_t)> duo(
      Heads heads, const HeadSettings<bfloat16>& full = Full::Config{}) const {
    return [own = shape(heads), full, config = window()](std::size_t layers) {
      ModelShape all = own;
      all.layers = layers;
      HeadPlan<bfloat16> plan{all, full};
      for (std::size_t layer = 0; layer < layers; ++layer) {
        for (std::size_t head = all.kv_heads / 2; head < all.kv_heads; ++head) {
          plan.set(layer, head, config);
        }
      }
      return plan;
    };
  }
  // `capacity` rows on average over all heads of the layers that have scores.
  [[nodiscard]] std::function<HeadPlan<bfloat16>(std::size_t)> headkv(Heads heads,
                                                                      std::size_t capacity) const {
    const HeadScores scores = scores_for(scores_, scaled(heads).kv);
    const HeadBudgets budgets =
        headkv_budgets(scores, scaled(heads).kv, {.capacity = capacity, .observation_window = 8});
    return [own = shape(heads), budgets](std::size_t layers) {
      ModelShape all = own;
      all.layers = layers;
      HeadPlan<bfloat16> plan{all};
      for (std::size_t layer = 0; layer < layers; ++layer) {
        for (std::size_t head = 0; head < all.kv_heads; ++head) {
          plan.set(layer, head, Budget::Config{.budget = budgets(layer % budgets.layers(), head)});
        }
      }
      return plan;
    };
  }

  // ---- registration

  // `once` and `each` are the approximate seconds for filling and for one thread count. Cases of a
  // minute or more are only run with all threads.
  template <class Body>
  void add(const std::string& name, double once, double each, const Body& body) {
    for (const std::size_t threads : threads_) {
      if (each > 45.0 && threads != threads_.back()) continue;
      const bool runs =
          list_.add(name + "/threads:" + std::to_string(threads), run_.smoke ? 1.0 : once + each,
                    [body, threads](benchmark::State& state) { body(state, threads); });
      if (runs) once = 0.0;
    }
  }

  template <Element E>
  void add_decode(DecodeCase<E> what) {
    if (what.rows_of.empty()) what.rows_of = what.name;
    const HeadPlan<E> few = what.plan(what.layers);
    const History history{.compressed_at = what.tokens,
                          .chosen_at = what.tokens,
                          .selected = what.read == Read::selected,
                          .refreshes = what.refresh};
    double bytes = 0.0;
    for (std::size_t layer = 0; layer < what.layers; ++layer) {
      bytes += layer_bytes(few, layer, what.tokens, history);
    }
    // Filling writes about 1 GB/s, steps read 10 GB/s, and the reference takes a million rows a
    // second.
    const double times = what.flushed ? 1.0 : std::clamp(run_.cold_bytes() / bytes, 1.0, 64.0);
    const double filled =
        static_cast<double>(what.layers * few.shape().kv_heads * what.tokens) * 4.0 * head_dim * times;
    const double steps = static_cast<double>(run_.patience().least) * bytes;
    const std::size_t rows = what.flushed ? 0 : what.tokens;
    auto kept = std::make_shared<const DecodeCase<E>>(std::move(what));
    const double checked = static_cast<double>(3 * rows) * 1e-6;
    add(kept->name, filled * 1e-9, 0.3 + checked + run_.case_seconds + steps * 1e-10,
        [&run = run_, kept](benchmark::State& state, std::size_t threads) {
          run_decode(state, run, *kept, threads);
        });
  }

  template <Element E>
  using Attend = void (*)(benchmark::State&, Run&, const PrefillCase<E>&, std::size_t);
  template <Element E>
  void add_prefill(PrefillCase<E> what, std::type_identity_t<Attend<E>> attend, double share_of_calls) {
    what.chunk = chunk();
    if (what.rows_of.empty()) what.rows_of = what.name;
    const double flops = layer_flops(what.plan(), 0, what.tokens - what.chunk, what.chunk);
    auto kept = std::make_shared<const PrefillCase<E>>(std::move(what));
    const double calls = static_cast<double>(prefill_patience(run_).least) * share_of_calls;
    add(kept->name, 0.5, 2 * run_.case_seconds + calls * flops * 1e-11,
        [&run = run_, kept, attend](benchmark::State& state, std::size_t threads) {
          attend(state, run, *kept, threads);
        });
  }

  // ---- decode

  template <Element E>
  [[nodiscard]] std::function<HeadPlan<E>(std::size_t)> dense(Heads heads) const {
    return [own = shape(heads)](std::size_t layers) {
      ModelShape all = own;
      all.layers = layers;
      return HeadPlan<E>{all};
    };
  }
  template <Element E>
  void full(const std::string& type, Heads heads, std::size_t tokens, const std::string& baseline) {
    add_decode<E>({.name = decode_name(type, heads, tokens),
                   .baseline = baseline,
                   .rows_of = {},
                   .plan = dense<E>(heads),
                   .tokens = scaled(tokens)});
  }
  [[nodiscard]] static std::string decode_name(const std::string& policy, Heads heads, std::size_t tokens) {
    return "decode/" + policy + "/" + heads.name() + "/" + tokens_name(tokens);
  }

  // Keys and values with several groups in a row.
  [[nodiscard]] static std::string group_name(std::size_t bits, std::size_t group) {
    return "int" + std::to_string(bits) + "_group" + std::to_string(group);
  }

  void decode(Heads heads, std::size_t tokens) {
    const std::string baseline = decode_name("bf16", heads, tokens);
    const auto mixed = [&](const std::string& policy, auto plan) {
      return DecodeCase<bfloat16>{.name = decode_name(policy, heads, tokens),
                                  .baseline = policy == "bf16" ? std::string{} : baseline,
                                  .rows_of = {},
                                  .plan = std::move(plan),
                                  .tokens = scaled(tokens)};
    };
    add_decode(mixed("bf16", uniform(heads, Full::Config{})));
    full<float16>("f16", heads, tokens, baseline);
    if (tokens <= 64 * Ki) full<float>("f32", heads, tokens, baseline);
    for (const std::size_t bits : {8U, 4U, 2U}) {
      add_decode(mixed("int" + std::to_string(bits), uniform(heads, quantized<PerToken>(bits))));
    }
    add_decode(mixed("kivi4", uniform(heads, quantized<PerChannel>(4))));
    if (heads.kv == 8 && (tokens == 16 * Ki || tokens == 64 * Ki || run_.smoke)) {
      for (const std::size_t bits : {8U, 4U, 2U}) {
        for (const std::size_t group : {32U, 64U}) {
          add_decode(mixed(group_name(bits, group), uniform(heads, quantized<PerToken>(bits, group, group))));
        }
      }
      // The formats that tools choose: keys per channel, sinks and the latest rows exact.
      for (const std::string precision : {"int8", "int4", "int3", "int2", "k8v4"}) {
        add_decode(mixed("default_" + precision, uniform(heads, named(precision, heads))));
      }
      for (const std::string precision : {"int4", "int2"}) {
        add_decode(
            mixed("default_" + precision + "_normal", uniform(heads, normal_values(precision, heads))));
      }
      // Rows as some engines have them.
      for (const Codebook codebook : {Codebook::fp8, Codebook::mxfp4, Codebook::nvfp4}) {
        add_decode(mixed(std::string{name_of(codebook)},
                         uniform(heads, LowBitFormat::of_small_floats(codebook).head<bfloat16>())));
      }
      for (const std::size_t bits : {6U, 5U, 3U}) {
        add_decode(mixed("int" + std::to_string(bits), uniform(heads, quantized<PerToken>(bits))));
      }
      add_decode(mixed(group_name(3, 32), uniform(heads, quantized<PerToken>(3, 32, 32))));
      add_decode(mixed("int4_rotated", uniform(heads, rotated(quantized<PerToken>(4)))));
      add_decode(mixed("duo_default_int4", duo(heads, named("int4", heads))));
      add_decode(mixed("kivi4_group64", uniform(heads, quantized<PerChannel>(4, 64))));
      add_decode(mixed("kivi2_group64", uniform(heads, quantized<PerChannel>(2, 64))));
    }
    add_decode(mixed("duo", duo(heads)));
    if (tokens == 16 * Ki || tokens == 64 * Ki || run_.smoke) {
      auto ragged = mixed("headkv", headkv(heads, run_.smoke ? 64 : tokens / 16));
      ragged.layers = scores_for(scores_, scaled(heads).kv).layers();
      ragged.compressed = true;
      add_decode(std::move(ragged));
    }
    if (tokens < 4 * budget() && !run_.smoke) return;
    const std::size_t chosen = std::min(budget(), scaled(tokens) / 2 / 16 * 16);
    const auto retrieving = uniform(heads, MinMaxChunks::Config{.chunk = 16, .budget = chosen});
    // The case that reads fewer bytes comes first, because both share rows and it needs more
    // layers.
    for (const bool refresh : {false, true}) {
      auto what = mixed(refresh ? "retrieval" : "standing", retrieving);
      what.rows_of = decode_name("standing", heads, tokens);
      what.read = Read::selected;
      what.refresh = refresh;
      add_decode(std::move(what));
    }
  }

  void streaming() {
    const Heads heads{32, 8};
    const std::string first = decode_name("streaming", heads, 1000);
    for (const std::size_t tokens : {1000U, 1000000U}) {
      add_decode<bfloat16>({.name = decode_name("streaming", heads, tokens),
                            .baseline = tokens == 1000 ? std::string{} : first,
                            .rows_of = {},
                            .plan = uniform(heads, window()),
                            .tokens = scaled(tokens),
                            .flushed = true,
                            .samples = 100});
    }
  }

  // ---- prefill

  void prefill(Heads heads, std::size_t tokens) {
    const auto name = [&](const std::string& policy) {
      return "prefill/" + policy + "/" + heads.name() + "/" + tokens_name(tokens);
    };
    const auto of_policy = [&]<Element E>(const std::string& policy,
                                          std::function<HeadPlan<E>(std::size_t)> plan,
                                          std::type_identity_t<Attend<E>> attend) {
      add_prefill<E>({.name = name(policy),
                      .baseline = policy == "bf16" ? std::string{} : name("bf16"),
                      .rows_of = {},
                      .plan = [plan] { return plan(1); },
                      .tokens = scaled(tokens)},
                     attend, 1.0);
    };
    const Attend<bfloat16> attend = run_prefill<bfloat16, bfloat16>;
    of_policy("bf16", uniform(heads, Full::Config{}), attend);
    if (tokens > 16 * Ki) return;
    // With queries and outputs in float, the engine must compute more exact products.
    of_policy("bf16_float", uniform(heads, Full::Config{}), run_prefill<float, bfloat16>);
    of_policy("f16", dense<float16>(heads), run_prefill<float16, float16>);
    of_policy("f32", dense<float>(heads), run_prefill<float, float>);
    for (const std::size_t bits : {8U, 4U, 2U}) {
      of_policy("int" + std::to_string(bits), uniform(heads, quantized<PerToken>(bits)), attend);
      if (heads.kv == 8) {
        of_policy(group_name(bits, 32), uniform(heads, quantized<PerToken>(bits, 32, 32)), attend);
      }
    }
    of_policy("kivi4", uniform(heads, quantized<PerChannel>(4)), attend);
    if (heads.kv == 8) {
      for (const std::string precision : {"int8", "int4", "int3", "int2"}) {
        of_policy("default_" + precision, uniform(heads, named(precision, heads)), attend);
      }
      for (const std::string precision : {"int8", "int4"}) {
        of_policy("default_" + precision + "_float", uniform(heads, named(precision, heads)),
                  run_prefill<float, bfloat16>);
      }
    }
    of_policy("duo", duo(heads), attend);
    of_policy("retrieval", uniform(heads, MinMaxChunks::Config{.chunk = 16, .budget = budget()}), attend);
  }

  void compress() {
    const Heads heads{32, 8};
    for (const std::size_t tokens : {16 * Ki, 64 * Ki}) {
      if ((run_.quick || run_.smoke) && tokens != 16 * Ki) continue;
      const auto plan = uniform(heads, Budget::Config{.budget = run_.smoke ? 20 : tokens / 16 - 8});
      add_prefill<bfloat16>({.name = "compress/headkv/" + heads.name() + "/" + tokens_name(tokens),
                             .baseline = {},
                             .rows_of = {},
                             .plan = [plan] { return plan(1); },
                             .tokens = scaled(tokens)},
                            run_compress<bfloat16, bfloat16>, 1.0);
    }
  }

  void prompt() {
    const Heads heads{32, 8};
    for (const std::size_t tokens : {16 * Ki, 64 * Ki}) {
      if (run_.quick || (run_.smoke && tokens != 16 * Ki)) continue;
      const std::string tail = "/" + heads.name() + "/" + tokens_name(tokens);
      const auto of_policy = [&](const std::string& policy, auto plan) {
        add_prefill<bfloat16>({.name = "prompt/" + policy + tail,
                               .baseline = policy == "bf16" ? std::string{} : "prompt/bf16" + tail,
                               .rows_of = {},
                               .plan = [plan] { return plan(1); },
                               .tokens = scaled(tokens)},
                              run_prompt<bfloat16, bfloat16>, 4.0);
      };
      of_policy("bf16", uniform(heads, Full::Config{}));
      of_policy("duo", duo(heads));
    }
  }

  Run& run_;
  CaseList& list_;
  std::vector<std::size_t> threads_;
  HeadScores scores_;
};

constexpr std::string_view usage = R"(usage: attention_cpu_bench [options] [--benchmark_...]

Times attention of one layer on this machine's CPU under every policy. Each case is verified, then
timed with cold caches, with one thread and with all. Prints a line for each case; numbers are
medians of single calls.

  --filter REGEX    only these cases (their names: --benchmark_list_tests)
  --quick           one length, all threads, few samples: under two minutes
  --cached          always decode the same rows, which measures the arithmetic by itself where they
                    fit into the processor's caches (4Ki, say)
  --json FILE       results as JSON, for bench/compare.py and bench/plot_cpu.py
  --seconds S       seconds of samples for each case (default 1)
  --threads N       use N threads instead of all
  --memory GiB      memory for the rows of one case (default: a third of the free memory, at most 6)
  --scores FILE     head scores for the headkv cases, in HeadKV's format, of 32 heads a layer
                    (default: those of the shipped model, built in)
  --smoke           runs and verifies every case in a small size
)";

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, usage,
                     [](Run& run, CaseList& list, const Options& options) { Cases{run, list, options}; });
}
