// SPDX-License-Identifier: Apache-2.0
//
// Measures how long a text one card holds: the Llama-3-8B shape with 8-bit weights, half of the KV
// heads streaming, the rows of the others in 4 bits with one group a row. Decode steps are timed at
// 3,300,000 tokens (the headline of DuoAttention with QServe's kernels, arXiv:2410.10819, figure
// 12) and at the longest text that fits. Rows are random, and the steps are complete.
//
//   capacity_cuda_bench --benchmark_out=capacity.json --benchmark_out_format=json
#include <deque>
#include <string>

#include "model_case.hpp"
#include "program.hpp"

namespace {
using namespace kvpolicy;
using namespace kvpolicy::bench;

class Cases {
 public:
  explicit Cases(Run& run)
      : run_{run}, rig_{run}, config_{run.smoke ? smoke_model(llama_3_8b()) : llama_3_8b()} {
    if (run.smoke) {
      add("capacity/700", 700);
      return;
    }
    add("capacity/3300000", 3300000);
    add("capacity/longest", 0);
  }

 private:
  // Appended rows wait in rings that take memory; small rings cost little more time.
  static constexpr std::size_t filling_rows = 1024;

  void add(const std::string& name, std::size_t tokens) {
    add_case(name, run_.samples, benchmark::kMillisecond, [=, this](benchmark::State& state) {
      guarded(state, run_, name, [&] {
        const auto window = run_.smoke ? Streaming::Config{.sinks = 8, .recent = 24}
                                       : Streaming::Config{.sinks = 128, .recent = 256};
        rig_.use("Llama-3-8B", config_, reference::WeightFormat::int8, "duo_int4",
                 bench::duo_plan(config_.shape(), 0.5,
                                 Quantized::Config{.storage = {.bits = 4, .residual = 128}}, window),
                 run_.smoke ? 64 : filling_rows);
        const std::size_t more = run_.samples + 16;
        std::size_t context = tokens > 0 ? tokens : rig_.longest() - more;
        if (const std::size_t missing = rig_.missing(context + more)) {
          return skip_unfitting(state, run_, page_bytes(rig_.cache().plan(), rig_.cache().options(), context),
                                missing);
        }
        for (int tries = tokens > 0 ? 1 : 5; tries > 0; --tries) {
          try {
            rig_.fill(context, more);
            break;
          } catch (const std::bad_alloc&) {
            // The free memory is in pieces, some of them too small.
            if (tries == 1) throw;
            context -= context / 50;
          }
        }
        rig_.time_steps(state, name, "", /*graph=*/true);
        state.counters["weights_GiB"] = gibibytes(rig_.model().weight_bytes());
        state.counters["clamped"] = static_cast<double>(rig_.cache().clamped_numbers(run_.stream));
      });
    });
  }

  Run& run_;
  ModelRig rig_;
  reference::LlamaConfig config_;
};

constexpr std::string_view usage = R"(usage: capacity_cuda_bench [options] [--benchmark_...]

Measures the longest text on this card: Llama-3-8B's shape, 8-bit weights, half of the KV heads
streaming, 4-bit rows in the others. Fills the cache with random rows and times real decode steps.

  --samples N   timed decode steps (default 50)
  --smoke       runs in a small size
  --benchmark_out=FILE --benchmark_out_format=json
)";

}  // namespace

int main(int argc, char** argv) {
  return run_program(argc, argv, usage, /*flushes=*/false, {},
                     [](Run& run) { return std::make_unique<Cases>(run); });
}
