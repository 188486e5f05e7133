// SPDX-License-Identifier: Apache-2.0
//
// DuoAttention: some heads look things up anywhere in the text and keep all of it; the others read only its
// first and its latest rows. It suits long texts on models whose heads were classified by training
// (published gates) or by trying them one by one. Where about half of the heads are streaming heads, it
// halves a cache with equal answers.
//
//     auto plan = kvpolicy::duo_plan<kvpolicy::float16>(shape, gates, {.sparsity = 0.5});
//     kvpolicy::DuoCache<kvpolicy::float16> cache{plan};
//
// Method: Xiao et al., arXiv:2410.10819. Where we differ: ties between gates are spread evenly over the
// layers instead of broken by noise (plan/duo_gates.hpp); the window of a streaming head counts from each
// query, not from its prefill chunk, unless `mask` says so (policy/sink_recent_cache.hpp); weights need no
// reordering, because every head has its own segments (plan/reorder.hpp reorders them for other engines).
#pragma once

#include <cstddef>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/duo_gates.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/plan/require_fits.hpp>
#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/policy/sink_recent_cache.hpp>

namespace kvpolicy {

/// A cache of one sequence under a DuoAttention plan.
template <Element E = float, AttentionEngine Engine = ScalarEngine>
using DuoCache = KvCache<E, Engine>;

/// Settings of `duo_plan`: how many heads are streaming heads, and what those keep.
struct DuoConfig {
  double sparsity = 0.5;     ///< Share of streaming heads.
  std::size_t sinks = 128;   ///< First rows that a streaming head keeps.
  std::size_t recent = 256;  ///< Latest rows kept besides; both numbers as in the published training.
  Mask mask = Mask::exact;
  GateCut gate_cut = GateCut::exact_count;
};

namespace detail {

// A percentage would make every head stream.
inline void check_sparsity(double sparsity, std::string_view what) {
  require(sparsity >= 0.0 && sparsity <= 1.0, what, ": sparsity is ", sparsity,
          ", must be the share of streaming heads, 0 to 1");
}

}  // namespace detail

/// A plan with `retrieval` for the retrieval heads and `streaming` for the others.
/// @throws ConfigError if `kinds` does not fit the shape, or a setting does not work.
template <Element E>
[[nodiscard]] HeadPlan<E> plan_of_kinds(const ModelShape& shape, const HeadKinds& kinds,
                                        const HeadSettings<E>& retrieval, const HeadSettings<E>& streaming) {
  HeadPlan<E> plan{shape, streaming};
  detail::require_fits(kinds, shape, "plan_of_kinds");
  for (std::size_t layer = 0; layer < shape.layers; ++layer) {
    for (std::size_t head = 0; head < kinds.heads(); ++head) {
      if (kinds(layer, head) == HeadKind::retrieval) plan.set(layer, head, retrieval);
    }
  }
  return plan;
}

/// The plan that follows from DuoAttention's gates. Retrieval heads have the settings `retrieval`: they keep every
/// row exactly unless you give others, such as `LowBitFormat::of_text({4, 4}, shape).head<E>()` (plan/low_bits.hpp),
/// which is what `duo+int4` names.
/// @throws ConfigError if the gates do not fit the shape, a gate is not a number, the sparsity is not one
/// from 0 to 1, `recent` is 0, or a setting of `retrieval` does not work.
template <Element E = float>
[[nodiscard]] HeadPlan<E> duo_plan(
    const ModelShape& shape, const HeadGates& gates, const DuoConfig& config = {},
    const HeadSettings<E>& retrieval = typename FullCache<DenseStorage<E>>::Config{}) {
  detail::require_fits(gates, shape, "duo_plan");
  detail::check_sparsity(config.sparsity, "duo_plan");
  return plan_of_kinds<E>(shape, head_kinds(gates, config.sparsity, config.gate_cut), retrieval,
                          typename SinkRecentCache<DenseStorage<E>>::Config{
                              .sinks = config.sinks, .recent = config.recent, .mask = config.mask});
}

}  // namespace kvpolicy
