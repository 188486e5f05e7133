// SPDX-License-Identifier: Apache-2.0
//
// Tile registers in plain C++, after the description of TILELOADD, TILESTORED, TILEZERO and TDPBF16PS
// in the Intel SDM: rows of 64 bytes, and the second factor of a product in pairs of rows. The first
// and the second numbers of the pairs are summed separately, then together, then added to the old sum,
// in float, where subnormal numbers count as zeros of the same sign.
#pragma once

#include <array>
#include <bit>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>

namespace test {

class EmulatedTiles {
 public:
  static inline std::size_t products = 0;  ///< made by all threads; for tests that run one

  EmulatedTiles() {
    // The initial contents of tiles are undefined, so they are filled with NaN.
    for (Tile& tile : tiles_) {
      for (auto& row : tile) row.fill(0xffc12345U);
    }
  }
  EmulatedTiles(const EmulatedTiles&) = delete;
  EmulatedTiles& operator=(const EmulatedTiles&) = delete;
  ~EmulatedTiles() = default;

  template <int I>
  void zero() {
    for (auto& row : tiles_[I]) row.fill(0);
  }
  template <int I>
  void load(const void* from, std::size_t stride) {
    for (std::size_t row = 0; row < 16; ++row) {
      std::memcpy(tiles_[I][row].data(), static_cast<const std::byte*>(from) + row * stride, 64);
    }
  }
  template <int I>
  void store(void* to, std::size_t stride) {
    for (std::size_t row = 0; row < 16; ++row) {
      std::memcpy(static_cast<std::byte*>(to) + row * stride, tiles_[I][row].data(), 64);
    }
  }
  template <int Sums, int A, int B>
  void add_product() {
    static_assert(Sums != A && Sums != B && A != B);  // other operands are an invalid instruction
    ++products;
    std::array<std::array<float, 16>, 16> low_b{};
    std::array<std::array<float, 16>, 16> high_b{};
    for (std::size_t k = 0; k < 16; ++k) {
      for (std::size_t n = 0; n < 16; ++n) {
        low_b[k][n] = low(tiles_[B][k][n]);
        high_b[k][n] = high(tiles_[B][k][n]);
      }
    }
    for (std::size_t m = 0; m < 16; ++m) {
      std::array<float, 16> first{};
      std::array<float, 16> second{};
      for (std::size_t k = 0; k < 16; ++k) {
        const float low_a = low(tiles_[A][m][k]);
        const float high_a = high(tiles_[A][m][k]);
        for (std::size_t n = 0; n < 16; ++n) {
          first[n] = flushed(first[n] + flushed(low_a * low_b[k][n]));
          second[n] = flushed(second[n] + flushed(high_a * high_b[k][n]));
        }
      }
      for (std::size_t n = 0; n < 16; ++n) {
        const float old = flushed(std::bit_cast<float>(tiles_[Sums][m][n]));
        tiles_[Sums][m][n] = std::bit_cast<std::uint32_t>(flushed(old + flushed(first[n] + second[n])));
      }
    }
  }

 private:
  using Tile = std::array<std::array<std::uint32_t, 16>, 16>;

  static float flushed(float x) {
    return std::abs(x) < std::numeric_limits<float>::min() ? std::copysign(0.0F, x) : x;
  }
  static float low(std::uint32_t pair) { return flushed(std::bit_cast<float>(pair << 16)); }
  static float high(std::uint32_t pair) { return flushed(std::bit_cast<float>(pair & 0xffff0000U)); }

  std::array<Tile, 8> tiles_;
};

}  // namespace test
