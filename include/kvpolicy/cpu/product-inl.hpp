// SPDX-License-Identifier: Apache-2.0
//
// Matrix products in float, blocked for registers. A tile of many queries uses them with the rows of a row
// tile.
#pragma once

#include <algorithm>
#include <cstddef>

#include <kvpolicy/cpu/prefetch-inl.hpp>
#include <kvpolicy/cpu/row_tile-inl.hpp>
#include <kvpolicy/cpu/vector-inl.hpp>

namespace kvpolicy::cpu {
namespace HWY_NAMESPACE {

/// Rows and vectors of a product's result that are held in registers. There are enough sums to hide the
/// latency of a multiply-add, and more sums than loaded numbers: 10 loads for 16 sums if there are many
/// registers.
inline constexpr std::size_t product_rows = many_registers ? 8 : 4;
inline constexpr std::size_t product_vectors = many_registers ? 2 : 3;
inline constexpr std::size_t panel_width = product_vectors * lanes;

/// Prefetches one side of a row tile that will be needed soon, in equal parts while a product runs: a tile
/// computes for so long that the hardware prefetcher stops. A few cache lines at a time, because many at
/// once would fill the queue in which the product's own loads wait.
class FetchAhead {
 public:
  /// Terms of a sum between two fetches.
  static constexpr std::size_t stretch = 16;

  FetchAhead() = default;
  FetchAhead(const RowTileSide& side, std::size_t rows, std::size_t head_dim)
      : rows_{side.codes.data()}, count_{rows}, row_bytes_{fetched_bytes(side.format.encoding, head_dim)} {}

  /// Begins a product of `blocks` register blocks of sums, each of `terms` terms.
  void start(std::size_t blocks, std::size_t terms) {
    const std::size_t lines = count_ * ((row_bytes_ + line_bytes - 1) / line_bytes);
    const std::size_t shares = std::max<std::size_t>(blocks * ((terms + stretch - 1) / stretch), 1);
    share_ = (lines + shares - 1) / shares;
  }
  HWY_INLINE void operator()() {
    for (std::size_t i = 0; i < share_ && row_ < count_; ++i) {
      fetch_to_second_level(rows_[row_] + at_);
      at_ += line_bytes;
      if (at_ < row_bytes_) continue;
      at_ = 0;
      ++row_;
    }
  }

 private:
  static constexpr std::size_t line_bytes = 64;

  const std::byte* const* rows_ = nullptr;
  std::size_t count_ = 0;
  std::size_t row_bytes_ = 0;
  std::size_t share_ = 0;
  std::size_t row_ = 0, at_ = 0;  // the next line to fetch
};

KVPOLICY_CPU_BEGIN_TARGET

/// A matrix [steps, width] in panels of `panel_width` columns: column x of row k is at `numbers[x /
/// panel_width * panel_stride + k * step + x % panel_width]`.
struct Panels {
  const float* numbers;
  std::size_t panel_stride;
  std::size_t step;
};

/// c[i, x] = sum over k of a[i * a_row + k * a_step] * b[k * b_step + x] for product_rows rows i and N
/// vectors x; with `factors`, factors[i] * c[i, x] is added.
template <std::size_t N>
HWY_INLINE void product_block(const float* a, std::size_t a_row, std::size_t a_step, const float* b,
                              std::size_t b_step, std::size_t steps, float* c, std::size_t c_row,
                              const float* factors, FetchAhead& ahead) {
  FloatVector sums[product_rows][N];
  unroll<product_rows>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
    unroll<N>([&](auto n) KVPOLICY_CPU_INLINE_LAMBDA {
      sums[i][n] = factors == nullptr
                       ? zero_vector()
                       : hn::Mul(hn::Set(floats, factors[i]), hn::LoadU(floats, c + i * c_row + n * lanes));
    });
  });
  for (std::size_t k = 0; k < steps;) {
    ahead();
    for (const std::size_t end = std::min(k + FetchAhead::stretch, steps); k < end; ++k) {
      FloatVector numbers[N];
      unroll<N>([&](auto n) KVPOLICY_CPU_INLINE_LAMBDA {
        numbers[n] = hn::LoadU(floats, b + k * b_step + n * lanes);
      });
      unroll<product_rows>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
        const auto factor = hn::Set(floats, a[i * a_row + k * a_step]);
        unroll<N>([&](auto n) KVPOLICY_CPU_INLINE_LAMBDA {
          sums[i][n] = hn::MulAdd(factor, numbers[n], sums[i][n]);
        });
      });
    }
  }
  unroll<product_rows>([&](auto i) KVPOLICY_CPU_INLINE_LAMBDA {
    unroll<N>([&](auto n)
                  KVPOLICY_CPU_INLINE_LAMBDA { hn::StoreU(sums[i][n], floats, c + i * c_row + n * lanes); });
  });
}

/// Calls visit.operator()<N>(x) for each panel of a matrix, which begins at column x and has N vectors.
template <class Visit>
HWY_INLINE void for_each_panel(std::size_t width, Visit&& visit) {
  for (std::size_t x = 0; x < width; x += panel_width) {
    const std::size_t vectors = std::min((width - x) / lanes, product_vectors);
    if (vectors == product_vectors) {
      visit.template operator()<product_vectors>(x);
    } else if (vectors == 2) {
      visit.template operator()<2>(x);
    } else {
      visit.template operator()<1>(x);
    }
  }
}

/// c = a b for `rows` rows, rounded up to product_rows, and `width` columns, a multiple of the lanes; a's
/// numbers are at a[i * a_row + k * a_step]. With `factors`, factors[i] * c[i, x] is added.
inline void product(const float* a, std::size_t a_row, std::size_t a_step, const Panels& b, std::size_t steps,
                    float* c, std::size_t c_row, std::size_t rows, std::size_t width, const float* factors,
                    FetchAhead& ahead) {
  ahead.start((rows + product_rows - 1) / product_rows * ((width + panel_width - 1) / panel_width), steps);
  // One panel of b stays in the first-level cache while all rows are multiplied with it.
  for_each_panel(width, [&]<std::size_t N>(std::size_t x) KVPOLICY_CPU_LAMBDA {
    const float* panel = b.numbers + x / panel_width * b.panel_stride;
    for (std::size_t i = 0; i < rows; i += product_rows) {
      product_block<N>(a + i * a_row, a_row, a_step, panel, b.step, steps, c + i * c_row + x, c_row,
                       factors == nullptr ? nullptr : factors + i, ahead);
    }
  });
}

KVPOLICY_CPU_END_TARGET
}  // namespace HWY_NAMESPACE
}  // namespace kvpolicy::cpu
