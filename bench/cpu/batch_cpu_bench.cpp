// SPDX-License-Identifier: Apache-2.0
//
// Times a layer's step of many sequences on the CPU in one call beside one call for each: equal plans and mixed
// ones, decoding alone and beside a part of a prompt. Every case is first checked bit by bit against the
// calls one by one.
//
//   batch_cpu_bench --json batch.json
//   batch_cpu_bench --filter 'mixed' --threads 2
#include <cstddef>
#include <string>
#include <utility>

#include "batch_case.hpp"
#include "program.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;

constexpr std::size_t Ki = 1024;

[[nodiscard]] ModelShape shape_of(std::size_t layers) { return {layers, 32, 8, 128}; }

[[nodiscard]] HeadPlan<bfloat16> full(std::size_t layers, std::size_t) {
  return HeadPlan<bfloat16>{shape_of(layers)};
}
// Every other head streams.
[[nodiscard]] HeadPlan<bfloat16> duo(std::size_t layers, std::size_t sequence) {
  HeadPlan<bfloat16> plan = full(layers, sequence);
  for (std::size_t layer = 0; layer < layers; ++layer) {
    for (std::size_t head = 1; head < 8; head += 2) {
      plan.set(layer, head, Streaming::Config{.sinks = 64, .recent = 256});
    }
  }
  return plan;
}
[[nodiscard]] HeadPlan<bfloat16> four_bits(std::size_t layers, std::size_t) {
  return HeadPlan<bfloat16>{shape_of(layers), PerToken::Config{.storage = {.bits = 4, .residual = 128}}};
}
[[nodiscard]] HeadPlan<bfloat16> mixed(std::size_t layers, std::size_t sequence) {
  if (sequence % 4 == 0) return full(layers, sequence);
  if (sequence % 4 == 1) return duo(layers, sequence);
  if (sequence % 4 == 2) return four_bits(layers, sequence);
  return HeadPlan<bfloat16>{shape_of(layers), Streaming::Config{.sinks = 64, .recent = 256}};
}

void add_cases(Run& run, CaseList& list, const Options& options) {
  const auto add = [&](BatchCase what) {
    for (const std::size_t threads : options.threads) {
      list.add(what.name + "/threads:" + std::to_string(threads), run.case_seconds + 1.0,
               [&run, what, threads](benchmark::State& state) { run_batch(state, run, what, threads); });
    }
  };
  const std::vector<std::pair<std::string, decltype(BatchCase::plan)>> plans{
      {"full", full}, {"duo", duo}, {"int4", four_bits}, {"mixed", mixed}};
  for (const auto& [name, plan] : plans) {
    for (const std::size_t sequences : {8U, 32U}) {
      for (const std::size_t tokens : {Ki / 4, Ki, 4 * Ki}) {
        if (run.smoke && tokens != Ki / 4) continue;
        if (run.quick && tokens != Ki) continue;
        const std::string size = std::to_string(sequences) + "x" + std::to_string(tokens);
        add({"batch/" + name + "/" + size, plan, sequences, tokens});
        if (name == "mixed")
          add({"batch/mixed+prompt/" + size, plan, sequences, tokens, run.smoke ? 16U : 128U});
      }
    }
  }
}

constexpr std::string_view usage = R"(usage: batch_cpu_bench [options]

Times a layer's step of 8 and 32 sequences on the CPU, in one call and in a call for each. A case is
named after its plan, the number of sequences and their tokens: batch/mixed/32x1024/threads:2.

  --filter REGEX   only these cases; --benchmark_list_tests shows their names
  --json FILE      results for machines, Google Benchmark's format
  --seconds S      of samples for each case (default 1)
  --threads N      instead of all threads
  --memory GiB     that the rows of one case may take
  --quick          one length, all threads
  --smoke          tiny cases, verified and hardly timed
  --spoil output   falsifies every case, to test that the check finds it
)";

}  // namespace

int main(int argc, char** argv) { return run_program(argc, argv, usage, add_cases); }
