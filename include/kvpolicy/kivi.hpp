// SPDX-License-Identifier: Apache-2.0
//
// KIVI: every row stays, in 2 or 4 bits, except the latest rows, which stay exact. Values are quantised per
// token. Keys are quantised per channel, in groups of rows, because their outliers are concentrated in few
// channels. It suits any model and needs no training or calibration.
//
//     kvpolicy::KvCache cache{kvpolicy::kivi_plan<kvpolicy::float16>(shape)};
//
// Method: Liu et al., arXiv:2402.02750. Where we differ: scales are rounded so that no number is off by
// more than half a step (storage/quantize.hpp). The flush is the published one: every `residual` rows, all
// keys since the last flush are quantised together, so at times no key is exact. `Flush::steady` instead
// keeps at least `residual` rows exact at all times.
#pragma once

#include <cstddef>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>

namespace kvpolicy {

/// Settings of `kivi_plan`; the defaults are the paper's 2-bit cache.
struct KiviConfig {
  std::size_t bits = 2;        ///< 2 or 4 in the paper; 8 works too.
  std::size_t group = 32;      ///< Rows of a key channel, and channels of a value row, that share a scale.
  std::size_t residual = 128;  ///< A multiple of `group`.
  Flush flush = Flush::kivi;
};

/// The plan that quantises every head with the same settings.
/// @throws ConfigError if the bits, the group or the residual do not work for the shape.
template <Element E = float>
[[nodiscard]] HeadPlan<E> kivi_plan(const ModelShape& shape, const KiviConfig& config = {}) {
  using Policy = QuantizedResidualCache<E, Granularity::per_channel>;
  return HeadPlan<E>{shape, typename Policy::Config{.storage = {.bits = config.bits,
                                                                .key_group = config.group,
                                                                .value_group = config.group,
                                                                .residual = config.residual,
                                                                .flush = config.flush}}};
}

}  // namespace kvpolicy
