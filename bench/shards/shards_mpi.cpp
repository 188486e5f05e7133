// SPDX-License-Identifier: Apache-2.0
//
// What a step of decoding takes on this machine: each rank's part by itself, or all ranks together under mpirun.
// bench/shards/measured.py runs it both ways and compares what the parts predict with what was measured.
#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdio>
#include <memory>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <time.h>

#include <CLI/CLI.hpp>
#include <nlohmann/json.hpp>

#include <kvpolicy/cpu.hpp>
#include <kvpolicy/duo.hpp>
#include <kvpolicy/io/duo_pattern.hpp>
#include <kvpolicy/plan/shards.hpp>
#include <reference_model/parallel/mpi_communicator.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/rank_cache.hpp>

#include "bench/cpu/neighbours.hpp"
#include "bench/cpu/samples.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::bench;
using namespace kvpolicy::reference;
using Json = nlohmann::ordered_json;
using RankRows = RankCache<float, cpu::Engine<>>;

// One of several ranks whose others are not there: it hears from itself what they would say. Between two messages it
// takes this thread's processor time.
class Alone final : public Communicator {
 public:
  Alone(std::size_t rank, std::size_t size) : rank_{rank}, size_{size} {}

  [[nodiscard]] std::size_t rank() const override { return rank_; }
  [[nodiscard]] std::size_t size() const override { return size_; }
  void sum(std::span<float>) override { note(); }
  void gather(std::span<const float> own, std::span<float> all) override {
    note();
    for (std::size_t rank = 0; rank < size_; ++rank) {
      std::ranges::copy(own, all.begin() + static_cast<std::ptrdiff_t>(rank * own.size()));
    }
  }
  void exchange(std::span<const Outgoing>, std::span<const Incoming>) override {
    fail<CommunicationError>("a rank that is alone has nobody to exchange messages with");
  }

  void begin() {
    between_.clear();
    latest_ = now();
  }
  /// Seconds up to each message since `begin`, and after the last one.
  [[nodiscard]] std::vector<double> end() {
    note();
    return between_;
  }

 private:
  static double now() {
    timespec time{};
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &time);
    return static_cast<double>(time.tv_sec) + 1e-9 * static_cast<double>(time.tv_nsec);
  }
  void note() {
    const double time = now();
    between_.push_back(time - latest_);
    latest_ = time;
  }

  std::size_t rank_, size_;
  std::vector<double> between_;
  double latest_ = 0;
};

struct Arguments {
  std::string model = "reference_model/weights/keyfinder";
  std::size_t alone = 0;
  std::size_t tokens = 4096;
  std::size_t steps = 100;
};

Shards divided(const HeadPlan<float>& plan, const Arguments& a, std::size_t ranks, bool equal) {
  if (equal) return even_shards(plan, bytes_read(plan, a.tokens), ranks);
  return balance(plan, a.tokens, {.ranks = ranks});
}

// Reads `tokens` tokens that mean nothing.
void fill(ParallelLlama& model, RankRows& cache, std::size_t tokens) {
  std::vector<int> some(256);
  for (std::size_t first = 0; first < tokens; first += some.size()) {
    for (std::size_t i = 0; i < some.size(); ++i) some[i] = static_cast<int>((first + i) * 131 % 251);
    (void)model.forward(std::span{some}.first(std::min(some.size(), tokens - first)), cache, LogitsOf::none);
  }
}

Json times_alone(const Llama& model, const HeadPlan<float>& plan, const Shards& shards, const Arguments& a) {
  Json ranks = Json::array();
  for (std::size_t rank = 0; rank < a.alone; ++rank) {
    Alone communicator{rank, a.alone};
    ParallelLlama part{model, shards, communicator};
    RankRows cache{plan, shards, communicator};
    fill(part, cache, a.tokens);
    std::vector<Samples> segments;
    for (std::size_t step = 0; step < a.steps; ++step) {
      communicator.begin();
      (void)part.forward(std::array{7}, cache);
      const std::vector<double> between = communicator.end();
      segments.resize(between.size());
      for (std::size_t i = 0; i < between.size(); ++i) segments[i].add(between[i]);
    }
    Json medians = Json::array();
    for (const Samples& segment : segments) medians.push_back(segment.median());
    ranks.push_back(std::move(medians));
  }
  return {{"segments", std::move(ranks)}};
}

Json spread(const Samples& samples) {
  return {{"best", samples.best()},
          {"median", samples.median()},
          {"p10", samples.at(0.1)},
          {"p90", samples.at(0.9)}};
}

Json times_together(const Llama& model, const HeadPlan<float>& plan, const Shards& shards, const Arguments& a,
                    Communicator& communicator) {
  ParallelLlama part{model, shards, communicator};
  RankRows cache{plan, shards, communicator};
  fill(part, cache, a.tokens);
  Samples samples;
  for (std::size_t step = 0; step < a.steps; ++step) {
    samples.add(seconds_of([&] { (void)part.forward(std::array{7}, cache); }));
  }
  return spread(samples);
}

Json run(const Arguments& a) {
  const Llama model = Llama::load(a.model, {.weights = WeightFormat::float32});
  const LlamaConfig& config = model.config();
  std::unique_ptr<MpiCommunicator> world;
  if (a.alone == 0) world = std::make_unique<MpiCommunicator>();
  const std::size_t ranks = world ? world->size() : a.alone;
  const Neighbours neighbours;
  Json result{{"ranks", ranks}, {"alone", a.alone > 0}, {"tokens", a.tokens}, {"steps", a.steps}};
  if (world && ranks > 1) {
    Samples sums, gathers;
    std::vector<float> numbers(config.hidden), own(4), all(4 * ranks);
    for (std::size_t i = 0; i < 10 * a.steps; ++i) {
      sums.add(seconds_of([&] { world->sum(numbers); }));
      gathers.add(seconds_of([&] { world->gather(own, all); }));
    }
    result["sum"] = spread(sums);
    result["gather"] = spread(gathers);
  }
  const io::DuoPattern pattern = io::load_duo_pattern(a.model + "/duo");
  Json cases = Json::array();
  for (const bool duo : {false, true}) {
    HeadPlan<float> plan{config.shape()};
    if (duo) {
      plan = duo_plan<float>(config.shape(), pattern.gates,
                             {.sparsity = 0.5, .sinks = pattern.sinks, .recent = pattern.recent});
    }
    for (const bool equal : {true, false}) {
      const Shards shards = divided(plan, a, ranks, equal);
      std::size_t gathers = 2;  // whether ranks have the same tokens, and whether one has failed
      for (std::size_t layer = 0; layer < shards.layers(); ++layer)
        gathers += shards.merges(layer).empty() ? 0 : 1;
      Json one{{"plan", duo ? "duo" : "full"},
               {"division", equal ? "equal heads" : "balanced"},
               {"sums", 2 * config.layers},
               {"gathers", gathers}};
      one.update(world ? times_together(model, plan, shards, a, *world)
                       : times_alone(model, plan, shards, a));
      cases.push_back(std::move(one));
      if (!world || world->rank() == 0) std::fprintf(stderr, ".");
    }
  }
  result["others_percent"] = neighbours.percent();
  result["cases"] = std::move(cases);
  if (world && world->rank() > 0) return {};
  return result;
}

}  // namespace

int main(int argc, char** argv) {
  Arguments a;
  CLI::App app{
      "Times steps of the reference model over ranks: under mpirun all of them together, with --alone the "
      "part "
      "of each by itself. Prints JSON; bench/shards/measured.py makes the results of docs/distributed.md "
      "from it.",
      "shards_mpi"};
  app.footer("Examples:\n  shards_mpi --alone 4\n  mpirun -n 4 shards_mpi");
  app.add_option("--model", a.model, "Model folder, with a DuoAttention pattern in duo/")
      ->capture_default_str();
  app.add_option("--alone", a.alone,
                 "Times the parts of so many ranks, one after another; 0: ranks of mpirun")
      ->check(CLI::Range(0, 64))
      ->capture_default_str();
  app.add_option("--tokens", a.tokens, "Tokens of the text")
      ->check(CLI::Range(1, 8192))
      ->capture_default_str();
  app.add_option("--steps", a.steps, "Steps that are timed")
      ->check(CLI::Range(1, 1000))
      ->capture_default_str();
  CLI11_PARSE(app, argc, argv);
  try {
    const Json result = run(a);
    if (!result.is_null()) std::printf("%s\n", result.dump().c_str());
  } catch (const std::exception& error) {
    std::fprintf(stderr, "shards_mpi: %s\n", error.what());
    std::fflush(stderr);
    if (a.alone == 0) MpiCommunicator::end_all();
    return 1;
  }
  return 0;
}
