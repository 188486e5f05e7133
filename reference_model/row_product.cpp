// SPDX-License-Identifier: Apache-2.0
#include <reference_model/row_product.hpp>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>

#ifdef KVPOLICY_WITH_HIGHWAY
#include <kvpolicy/cpu/vector-inl.hpp>
#endif

namespace kvpolicy::reference {

// Not in the header: who includes that may be compiled without Highway where this file has it.
bool has_row_product() noexcept {
#ifdef KVPOLICY_WITH_HIGHWAY
  return true;
#else
  return false;
#endif
}

#ifdef KVPOLICY_WITH_HIGHWAY
namespace {

using namespace kvpolicy::cpu::HWY_NAMESPACE;
using kvpolicy::cpu::HWY_NAMESPACE::lanes;
namespace hn = hwy::HWY_NAMESPACE;

template <class Number>
HWY_INLINE FloatVector load(const Number* numbers) {
  if constexpr (std::same_as<Number, std::int8_t>) {
    const hn::Rebind<std::int8_t, Floats> bytes;
    return hn::ConvertTo(floats, hn::PromoteTo(ints, hn::LoadU(bytes, numbers)));
  } else {
    return load_numbers<encoding_of<Number>>(reinterpret_cast<const std::byte*>(numbers), 0);
  }
}

// One output row of memory is a short stream, so four of them are read side by side.
constexpr std::size_t most_outputs = 4;

/// Sums of `Rows` rows of x and `Outputs` rows of the weight. Each sum has one accumulator, so its order does
/// not depend on what is computed beside it; reading memory takes longer than waiting for the additions.
template <std::size_t Rows, std::size_t Outputs, class Number>
void products(const float* x, const Number* weight, std::size_t columns, float (&sums)[Rows][4]) {
  FloatVector totals[Rows][most_outputs];
  KVPOLICY_CPU_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    KVPOLICY_CPU_UNROLL
    for (std::size_t o = 0; o < most_outputs; ++o) totals[r][o] = zero_vector();
  }
  std::size_t c = 0;
  for (; c + lanes <= columns; c += lanes) {
    FloatVector weights[Outputs];
    KVPOLICY_CPU_UNROLL
    for (std::size_t o = 0; o < Outputs; ++o) {
      weights[o] = load(weight + o * columns + c);
      // The processor's own prefetching stops at the end of each page of 4 KiB; with the next four rows
      // asked for here, one thread reads 11 GB/s instead of 8 (Sapphire Rapids).
      hwy::Prefetch(weight + (o + Outputs) * columns + c);
    }
    KVPOLICY_CPU_UNROLL
    for (std::size_t r = 0; r < Rows; ++r) {
      const auto numbers = hn::LoadU(floats, x + r * columns + c);
      KVPOLICY_CPU_UNROLL
      for (std::size_t o = 0; o < Outputs; ++o) {
        totals[r][o] = hn::MulAdd(weights[o], numbers, totals[r][o]);
      }
    }
  }
  KVPOLICY_CPU_UNROLL
  for (std::size_t r = 0; r < Rows; ++r) {
    store_sums(totals[r][0], totals[r][1], totals[r][2], totals[r][3], sums[r]);
    for (std::size_t o = 0; o < Outputs; ++o) {
      for (std::size_t i = c; i < columns; ++i) {
        sums[r][o] += static_cast<float>(weight[o * columns + i]) * x[r * columns + i];
      }
    }
  }
}

template <class Number>
void multiply_rows_of(const float* x, std::size_t rows, const WeightMatrix& weight, std::size_t first,
                      std::size_t count, float keep, float* y, std::size_t stride) {
  const std::size_t columns = weight.columns();
  const auto scales = weight.scales();
  for_each_portion<most_outputs>(count, [&]<std::size_t Outputs>(std::size_t at) {
    const Number* numbers = weight.row<Number>(first + at);
    for_each_portion<4>(rows, [&]<std::size_t Rows>(std::size_t row) {
      float sums[Rows][4];
      products<Rows, Outputs>(x + row * columns, numbers, columns, sums);
      for (std::size_t r = 0; r < Rows; ++r) {
        for (std::size_t o = 0; o < Outputs; ++o) {
          float& out = y[(row + r) * stride + at + o];
          const float sum = scales.empty() ? sums[r][o] : sums[r][o] * scales[first + at + o];
          out = keep == 0.0F ? sum : sum + keep * out;
        }
      }
    });
  });
}

}  // namespace

void multiply_rows(const float* x, std::size_t rows, const WeightMatrix& weight, std::size_t first,
                   std::size_t count, float keep, float* y, std::size_t stride) {
  const auto call = [&]<class Number>(Number) {
    multiply_rows_of<Number>(x, rows, weight, first, count, keep, y, stride);
  };
  switch (weight.format()) {
    case WeightFormat::float32: return call(float{});
    case WeightFormat::float16: return call(float16{});
    case WeightFormat::bfloat16: return call(bfloat16{});
    case WeightFormat::int8: return call(std::int8_t{});
  }
}

#else

void multiply_rows(const float*, std::size_t, const WeightMatrix&, std::size_t, std::size_t, float, float*,
                   std::size_t) {
  fail<ShapeError>("this build has no product of few rows: it was built without Highway");
}

#endif

}  // namespace kvpolicy::reference
