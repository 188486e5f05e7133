// SPDX-License-Identifier: Apache-2.0
//
// KIVI: every row stays, in 2 or 4 bits. Keys are quantised per channel, in groups of rows, for
// their outliers sit in few channels; values per token. For any model, without training or
// calibration; the latest rows stay exact.
//
//     kvpolicy::KiviCache<kvpolicy::half> cache{kvpolicy::kivi_plan<kvpolicy::half>(shape)};
//
// Method: Liu et al., arXiv:2402.02750. Where we differ: scales are rounded so that no number is
// off by more than half a step (storage/quantize.hpp). The flush is the published one: all keys
// since the last flush leave together every `residual` rows, so at times none is exact.
// `Flush::steady` keeps at least `residual` rows exact at all times instead.
#pragma once

#include <cstddef>

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/head_plan.hpp>
#include <kvpolicy/policy/quantized_residual_cache.hpp>

namespace kvpolicy {

/// Settings of `kivi_plan`; the defaults are the paper's 2-bit cache.
struct KiviConfig {
  std::size_t bits = 2;    ///< 2 or 4 in the paper; 8 works too.
  std::size_t group = 32;  ///< Rows of a key channel, and channels of a value row, of one scale.
  std::size_t residual = 128;  ///< A multiple of `group`.
  Flush flush = Flush::kivi;
};

/// The plan that quantises every head alike.
/// @throws ConfigError if the bits, the group or the residual do not work for the shape.
template <Element E = float>
[[nodiscard]] HeadPlan<E> kivi_plan(const ModelShape& shape,
    const KiviConfig& config = {}) {
  using Policy = QuantizedResidualCache<E, Granularity::per_channel>;
  return HeadPlan<E>{shape, typename Policy::Config{.storage = {.bits = config.bits,
                                                                          .key_group = config.group,
                                                                          .value_group = config.group,
                                                                          .residual = config.residual,
                                                                          .flush = config.flush}}};
}

}  // namespace kvpolicy
