// SPDX-License-Identifier: Apache-2.0
//
// A golden checkpoint over NCCL, a rank for each GPU: a prompt that all read at once, then token by token. Every rank
// compares the logits with PyTorch's. Without a GPU it says so and exits with 77.
//
//   nccl_ranks FOLDER
#include <algorithm>
#include <chrono>
#include <cstddef>
#include <cstdio>
#include <exception>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include <cuda_runtime_api.h>

#include <kvpolicy/plan/shards.hpp>
#include <reference_model/parallel/nccl_communicator.hpp>
#include <reference_model/parallel/parallel_llama.hpp>
#include <reference_model/parallel/prefill_over_ranks.hpp>
#include <reference_model/parallel/rank_cache.hpp>

#include "model/golden.hpp"
#include "parallel/communicator_trial.hpp"

namespace {

using namespace kvpolicy;
using namespace kvpolicy::reference;

void run(Communicator& ranks, const std::string& folder) {
  try_communicator(ranks);
  const Llama model = Llama::load(folder, {.weights = WeightFormat::float32});
  const Golden golden = load_golden(folder.substr(folder.rfind('/') + 1));
  const std::span<const int> tokens{golden.tokens};
  const HeadPlan<float> plan{model.config().shape()};
  const Shards shards = balance(plan, 1000, {.ranks = ranks.size()});
  RankCache<float> cache{plan, shards, ranks};
  std::vector<float> logits = prefill_over_ranks(model, cache, tokens.first(100), LogitsOf::all);
  ParallelLlama own{model, shards, ranks};
  for (std::size_t at = 100; at < tokens.size(); ++at) {
    const std::vector<float> more = own.forward(tokens.subspan(at, 1), cache);
    logits.insert(logits.end(), more.begin(), more.end());
  }
  const float error = largest_error(logits, golden.logits);
  std::printf("rank %zu of %zu: largest error %g\n", ranks.rank(), ranks.size(), static_cast<double>(error));
  require(error <= 1.5F * logit_tolerance, "the logits are off by ", error);
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 2) return 2;
  int devices = 0;
  const cudaError_t found = cudaGetDeviceCount(&devices);
  if (found != cudaSuccess || devices == 0) {
    std::printf("Skipped: no GPU (%s)\n",
                found == cudaSuccess ? "none is installed" : cudaGetErrorString(found));
    return 77;
  }
  const auto size = static_cast<std::size_t>(std::min(devices, 4));
  const NcclId id = make_nccl_id();
  std::vector<int> failed(size, 0);
  std::vector<std::thread> threads;
  for (std::size_t rank = 0; rank < size; ++rank) {
    threads.emplace_back([&, rank] {
      try {
        NcclCommunicator ranks{id, rank, size, {.timeout = std::chrono::minutes{1}}};
        run(ranks, argv[1]);
      } catch (const std::exception& error) {
        std::fprintf(stderr, "rank %zu: %s\n", rank, error.what());
        failed[rank] = 1;
      }
    });
  }
  for (std::thread& thread : threads) thread.join();
  return std::ranges::count(failed, 0) == static_cast<std::ptrdiff_t>(size) ? 0 : 1;
}
