// SPDX-License-Identifier: Apache-2.0
//
// A golden checkpoint over MPI: every rank compares the logits with PyTorch's. Started by mpirun.
//
//   ranks FOLDER            the checkpoint, in chunks and token by token, as a prompt that all read at once, and as
//                           several texts in a step
//   ranks FOLDER --die 1    rank 1 ends without a word after the first chunk
//   ranks FOLDER --stop 1   rank 1 stops answering
//   ranks FOLDER --other 1  rank 1 has other shards
//   ranks FOLDER --tokens 1 rank 1 reads another token
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include <kvpolicy/plan/shards.hpp>
#include <reference_model/language_model.hpp>
#include <reference_model/parallel/mpi_communicator.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/prefill_over_ranks.hpp>
#include <reference_model/parallel/rank_cache.hpp>
#include <reference_model/run.hpp>

#include "model/golden.hpp"
#include "parallel/communicator_trial.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::reference;

struct Fault {
  std::string kind;
  std::size_t rank = 0;
  [[nodiscard]] bool is(const char* what, const Communicator& ranks) const {
    return kind == what && rank == ranks.rank();
  }
};

// Two texts and a fork of the second, of other lengths, read together. Returns the largest error of a logit.
float run_together(MpiCommunicator& ranks, const std::string& folder) {
  const Llama model = Llama::load(folder, {.weights = WeightFormat::float32});
  const Golden golden = load_golden(folder.substr(folder.rfind('/') + 1));
  HeadPlan<float> plan{model.config().shape()};
  limit_windows(plan, model.config());
  const Shards shards = balance(plan, 1000, {.ranks = ranks.size()});
  const ParallelLlama own{model, shards, ranks};
  const ModelReader reader{own};
  using Rows = RankCache<float>;
  std::vector<Rows> texts;
  for (int i = 0; i < 2; ++i) texts.emplace_back(plan, shards, ranks);
  float worst = 0;
  const auto read = [&](const std::vector<std::size_t>& counts) {
    std::vector<BatchCall<Rows>> calls;
    std::vector<std::size_t> first;
    for (std::size_t i = 0; i < counts.size(); ++i) {
      first.push_back(texts[i].tokens());
      calls.push_back({&texts[i], {std::span{golden.tokens}.subspan(first[i], counts[i]), LogitsOf::all}});
    }
    const auto found = reader.read_each(std::span<const BatchCall<Rows>>{calls});
    for (std::size_t i = 0; i < counts.size(); ++i) {
      if (found[i].error) std::rethrow_exception(found[i].error);
      const std::size_t vocabulary = reader.vocabulary();
      const auto expected = std::span{golden.logits}.subspan(first[i] * vocabulary, counts[i] * vocabulary);
      worst = std::max(worst, largest_error(found[i].logits, expected));
    }
  };
  read({60, 7});
  read({1, 30});
  texts.push_back(texts[1].fork());
  read({20, 1, 40});
  read({1, 2, 1});
  return worst;
}

// Returns the largest error of a logit. A chunk of 0: all ranks read the text at once, but for its end.
float run(MpiCommunicator& ranks, const std::string& folder, std::size_t chunk, const Fault& fault) {
  const Llama model = Llama::load(folder, {.weights = WeightFormat::float32});
  const std::string name = folder.substr(folder.rfind('/') + 1);
  const Golden golden = load_golden(name);
  const std::span<const int> tokens{golden.tokens};
  HeadPlan<float> plan{model.config().shape()};
  limit_windows(plan, model.config());
  const Shards shards = balance(plan, 1000, {.ranks = ranks.size(), .cut_rows = !fault.is("--other", ranks)});
  ParallelLlama own{model, shards, ranks};
  RankCache<float> cache{plan, shards, ranks};
  std::vector<float> logits;
  std::size_t first = 0;
  if (chunk == 0) {
    first = tokens.size() - 13;
    logits = prefill_over_ranks(model, cache, tokens.first(first), LogitsOf::all);
    chunk = 1;
  }
  for (; first < tokens.size(); first += chunk) {
    const auto part = tokens.subspan(first, std::min(chunk, tokens.size() - first));
    std::vector<int> read{part.begin(), part.end()};
    if (fault.is("--tokens", ranks)) read.back() = read.back() == 1 ? 2 : 1;
    const std::vector<float> some = own.forward(read, cache, LogitsOf::all);
    logits.insert(logits.end(), some.begin(), some.end());
    if (fault.is("--die", ranks)) std::_Exit(3);
    while (fault.is("--stop", ranks)) ::pause();  // until mpirun ends it
  }
  // All ranks have the same bits, so they choose the same tokens.
  std::uint64_t digest = 0;
  for (const float logit : logits) {
    std::uint32_t bits = 0;
    std::memcpy(&bits, &logit, sizeof bits);
    digest = digest * 31 + bits;
  }
  require_same(ranks, "logits", digest);
  return largest_error(logits, golden.logits);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc < 2) return 2;
  try {
    const Fault fault = argc > 3 ? Fault{argv[2], std::strtoul(argv[3], nullptr, 10)} : Fault{};
    const bool waits = fault.kind == "--die" || fault.kind == "--stop";
    MpiCommunicator ranks{waits ? std::chrono::seconds{3} : std::chrono::minutes{2}};
    if (!waits) try_communicator(ranks);
    for (const std::size_t chunk : {150U, 40U, 1U, 0U}) {
      const float error = run(ranks, argv[1], chunk, fault);
      if (ranks.rank() == 0)
        std::printf("%zu ranks, %s: largest error %g\n", ranks.size(),
                    chunk == 0 ? "all at once" : ("chunks of " + std::to_string(chunk)).c_str(),
                    static_cast<double>(error));
      require(error <= 1.5F * logit_tolerance, "the logits are off by ", error);
    }
    const float error = run_together(ranks, argv[1]);
    require(error <= 1.5F * logit_tolerance, "the logits of several texts are off by ", error);
    if (ranks.rank() == 0) std::printf("as it should be\n");
  } catch (const std::exception& error) {
    std::fprintf(stderr, "%s\n", error.what());
    std::fflush(stderr);
    MpiCommunicator::end_all();
  }
  return 0;
}
