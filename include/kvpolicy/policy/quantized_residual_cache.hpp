// SPDX-License-Identifier: Apache-2.0
//
// Keeps every row, the latest in full precision and the others at 2, 4 or 8 bits. The storage
// does all of it (storage/residual_storage.hpp names the papers); the policy is FullCache.
#pragma once

#include <kvpolicy/policy/full_cache.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

namespace kvpolicy {

/// One head that keeps every row, older ones in few bits. `Keys` says what keys share a scale;
/// values share it within a row.
template <Element E, Granularity Keys = Granularity::per_token>
using QuantizedResidualCache = FullCache<ResidualStorage<E, Keys>>;

}  // namespace kvpolicy
