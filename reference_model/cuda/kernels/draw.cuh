// SPDX-License-Identifier: Apache-2.0
//
// Draws a token on the device from logits that are sorted, as reference::Sampler does on the host: by temperature, of
// the top_k likeliest, of the shortest run of the likeliest that reaches the share top_p (Holtzman et al.,
// arXiv:1904.09751). One block, so that sums have one order and a seed gives the same tokens in every run.
#pragma once

#include <climits>

#include <kvpolicy/cuda/kernels/block_sums.cuh>
#include <kvpolicy/cuda/kernels/simt.cuh>
#include <reference_model/cuda/kernels/choices.cuh>
#include <reference_model/cuda/kernels/random.cuh>

namespace kvpolicy::gpu::llama {

struct DrawParams {
  const float* logits = nullptr;  ///< [vocabulary], the largest first; NaN may be at both ends
  const int* tokens = nullptr;    ///< [vocabulary], whose logits these are
  int vocabulary = 0;
  int most = 0;             ///< tokens that may be drawn, at least 1
  float scale_log2 = 1.0F;  ///< log2(e) / temperature
  float top_p = 1.0F;
  std::uint64_t seed = 0;
  long long* draws = nullptr;  ///< so many random numbers have been taken
  Choices choices = {};
};

inline constexpr int draw_threads = 512;

template <int Threads>
struct DrawShared {
  typename BlockSums<double, Threads>::Memory sums;
  int first[Threads / warp_lanes];  ///< of each warp, the first place where the sum is enough
  double sum;                       ///< the sum there
};
constexpr std::size_t draw_shared_bytes() { return sizeof(DrawShared<draw_threads>); }

/// Weights are relative to the likeliest token's, so that no exponential overflows.
template <int Threads>
struct SortedWeights {
  const DrawParams& p;
  DrawShared<Threads>& shared;

  KVPOLICY_DEVICE float weight(int place) const {
    return place < p.most ? exp2_approximate((p.logits[place] - p.logits[0]) * p.scale_log2) : 0.0F;
  }

  struct Found {
    int place;   ///< how many tokens have a weight above 0, if the sum is never enough
    double sum;  ///< of all weights up to this place
  };
  /// The first place where the sum of all weights up to it is at least `least` and above `above`. Called by all
  /// threads.
  KVPOLICY_DEVICE Found find(double least, double above) const {
    double before = 0.0;
    int weighed = 0;
    for (int base = 0; base < p.most; base += Threads) {
      const int place = base + thread_index();
      const float own = weight(place);
      const auto sums = BlockSums<double, Threads>::of(static_cast<double>(own), shared.sums);
      const double up_to = before + sums.before + static_cast<double>(own);
      const std::uint32_t enough = ballot(own > 0.0F && up_to >= least && up_to > above);
      const auto weights = static_cast<int>(count_bits(ballot(own > 0.0F)));
      const int lane = static_cast<int>(count_bits((enough & (0U - enough)) - 1U));  // the lowest
      if (lane_index() == 0)
        shared.first[warp_index()] = enough != 0 ? place + lane : INT_MAX - warp_lanes + weights;
      sync_block();
      int first = INT_MAX;
      int positive = 0;
      for (int warp = 0; warp < Threads / warp_lanes; ++warp) {
        const int of_warp = shared.first[warp];
        const bool found = of_warp < INT_MAX - warp_lanes;
        if (found && first == INT_MAX) first = of_warp;
        positive += found ? warp_lanes : of_warp - (INT_MAX - warp_lanes);
      }
      if (place == first) shared.sum = up_to;
      sync_block();
      if (first != INT_MAX) return {first, shared.sum};
      before += sums.total;
      weighed += positive;
      if (positive < Threads) break;  // they are sorted: the rest is 0
    }
    return {weighed, before};
  }
};

template <int Threads = draw_threads>
KVPOLICY_KERNEL(Threads, 1)
draw_kernel(const KVPOLICY_GRID_CONSTANT DrawParams p) {
  const float infinity = float_of_bits(0x7f800000U);
  const float best = p.logits[0];
  const float least = p.logits[p.vocabulary - 1];
  const bool known = best < infinity && best > -infinity && least == least;
  const SortedWeights<Threads> weights{p, *reinterpret_cast<DrawShared<Threads>*>(shared_memory())};
  int place = 0;
  if (known) {
    const double never = static_cast<double>(infinity);
    auto kept = weights.find(never, 0.0);
    int last = kept.place - 1;
    if (p.top_p < 1.0F) {
      kept = weights.find(static_cast<double>(p.top_p) * kept.sum, 0.0);
      if (kept.place < last) last = kept.place;
    }
    const std::uint64_t bits = random_bits(p.seed, *p.draws);
    const double uniform = static_cast<double>(bits >> 11) * 0x1p-53;
    place = weights.find(0.0, uniform * kept.sum).place;
    if (place > last) place = last;  // rounding may leave a remainder
    if (place < 0) place = 0;
  }
  if (thread_index() > 0) return;
  p.choices.record(known ? p.tokens[place] : no_token);
  ++*p.draws;
}

}  // namespace kvpolicy::gpu::llama
