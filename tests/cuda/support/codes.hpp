// SPDX-License-Identifier: Apache-2.0
//
// The widths of codes that kernels have.
#pragma once

#include <array>
#include <string>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cuda/kernels/head.cuh>

namespace test {

/// What a head's keys and values are quantised to.
struct Codes {
  kvpolicy::Encoding keys;
  kvpolicy::Encoding values;

  constexpr Codes(kvpolicy::Encoding both) : keys{both}, values{both} {}
  constexpr Codes(kvpolicy::Encoding of_keys, kvpolicy::Encoding of_values)
      : keys{of_keys}, values{of_values} {}

  [[nodiscard]] constexpr bool are_alike() const { return keys == values; }
  void describe(kvpolicy::cuda::HeadView& view) const {
    view.key_encoding = keys;
    view.value_encoding = values;
  }
};
inline std::string name_of(const Codes& codes) {
  return std::string{kvpolicy::name_of(codes.keys)} + " keys, " +
         std::string{kvpolicy::name_of(codes.values)} + " values";
}

/// All of them.
inline constexpr std::array all_codes{Codes{kvpolicy::Encoding::uint8},
                                      Codes{kvpolicy::Encoding::uint4},
                                      Codes{kvpolicy::Encoding::uint2},
                                      Codes{kvpolicy::Encoding::uint8, kvpolicy::Encoding::uint4},
                                      Codes{kvpolicy::Encoding::uint8, kvpolicy::Encoding::uint2},
                                      Codes{kvpolicy::Encoding::uint4, kvpolicy::Encoding::uint2}};

}  // namespace test
