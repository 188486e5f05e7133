// SPDX-License-Identifier: Apache-2.0
//
// Decides which numbers can be quantised: those in the range of half, because the scale and the zero of a
// group are stored as half. Host and device use the same function and differ only in the reaction. The host
// refuses the call with a ShapeError before anything changes. A kernel cannot throw: it clamps the number
// and counts it (gpu::KvCache::clamped_numbers).
//
// The function tests the number's bits, because compilers that assume no NaNs and no infinities
// (-ffast-math) remove comparisons of floats.
#pragma once

#include <bit>
#include <cstdint>

#include <kvpolicy/core/host_device.hpp>

namespace kvpolicy {

/// The largest number that can be quantised; it is half's largest number.
inline constexpr float largest_quantizable = 65504.0F;

/// Whether the float with these bits can be quantised. Pass the number as it is stored, rounded to
/// the rows' element type: 65,450 becomes 65,536 in bfloat16.
[[nodiscard]] KVPOLICY_HOST_DEVICE constexpr bool is_quantizable(std::uint32_t bits) {
  return (bits & 0x7fffffffU) <= 0x477fe000U;  // 65504; NaN and infinity are above
}
static_assert(std::bit_cast<std::uint32_t>(largest_quantizable) == 0x477fe000U);

}  // namespace kvpolicy
