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
  void describe(kvpolicy::gpu::HeadView& view) const {
    view.key_encoding = keys;
    view.value_encoding = values;
  }
};
inline std::string name_of(const Codes& codes) {
  return std::string{kvpolicy::name_of(codes.keys)} + " keys, " +
         std::string{kvpolicy::name_of(codes.values)} + " values";
}

/// Those for which the decode kernel has code of their own.
inline constexpr std::array own_shapes{Codes{kvpolicy::Encoding::uint8},
                                       Codes{kvpolicy::Encoding::uint4},
                                       Codes{kvpolicy::Encoding::uint2},
                                       Codes{kvpolicy::Encoding::uint8, kvpolicy::Encoding::uint4},
                                       Codes{kvpolicy::Encoding::uint8, kvpolicy::Encoding::uint2},
                                       Codes{kvpolicy::Encoding::uint4, kvpolicy::Encoding::uint2}};

/// Those and others: every width of keys and every width of values, values of more bits than keys, codes in halves.
inline constexpr std::array all_codes{own_shapes[0],
                                      own_shapes[1],
                                      own_shapes[2],
                                      own_shapes[3],
                                      own_shapes[4],
                                      own_shapes[5],
                                      Codes{kvpolicy::Encoding::uint3},
                                      Codes{kvpolicy::Encoding::uint5},
                                      Codes{kvpolicy::Encoding::uint6},
                                      Codes{kvpolicy::Encoding::uint4, kvpolicy::Encoding::uint3},
                                      Codes{kvpolicy::Encoding::uint3, kvpolicy::Encoding::uint2},
                                      Codes{kvpolicy::Encoding::uint8, kvpolicy::Encoding::uint3},
                                      Codes{kvpolicy::Encoding::uint2, kvpolicy::Encoding::uint8},
                                      Codes{kvpolicy::Encoding::uint6, kvpolicy::Encoding::uint4},
                                      Codes{kvpolicy::Encoding::uint4x2, kvpolicy::Encoding::uint4},
                                      Codes{kvpolicy::Encoding::uint3, kvpolicy::Encoding::uint4x2}};

/// Those that have upper halves.
inline constexpr std::array codes_in_halves{Codes{kvpolicy::Encoding::uint4x2},
                                            all_codes[all_codes.size() - 2], all_codes[all_codes.size() - 1]};

}  // namespace test
