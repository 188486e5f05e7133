// SPDX-License-Identifier: Apache-2.0
#include <reference_model/linear.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <reference_model/library_product.hpp>
#include <reference_model/parallel.hpp>
#include <reference_model/row_product.hpp>

namespace kvpolicy::reference {
namespace {

/// A product is divided among the threads by the weight's rows. Two threads take longer to meet than one
/// takes to read fewer weights than this.
constexpr std::size_t min_shared_weights = std::size_t{1} << 18;

/// Rows of a weight that one thread multiplies at once. With few rows of x a slice takes some microseconds;
/// with many, its results fit the second level cache.
constexpr std::size_t few_rows_slice = 64;
constexpr std::size_t many_rows_slice = 256;

/// Numbers of a weight that are converted to float at once, also for that cache.
constexpr std::size_t most_converted = std::size_t{1} << 17;

MatrixView rows_of(const float* x, std::size_t rows, std::size_t width, bool transposed = false) {
  return {.data = x, .rows = rows, .columns = width, .stride = width, .transposed = transposed};
}

/// Memory that a thread keeps between products. Its contents are undefined.
template <class Number, int Use>
Number* scratch(std::size_t count) {
  thread_local std::vector<Number> memory;
  if (memory.size() < count) memory.resize(count);
  return memory.data();
}

/// x in two terms, rows of the first before those of the second: x = high + low with an error of at most
/// 2^-16 of each number. The rows are padded to a multiple of 32 in all, so products have few shapes.
struct SplitRows {
  SplitRows(const float* x, std::size_t rows_, std::size_t width)
      : rows{rows_}, padded{(2 * rows + 31) / 32 * 32} {
    const std::size_t count = rows * width;
    bfloat16* out = scratch<bfloat16, 0>(padded * width);
    for (std::size_t i = 0; i < count; ++i) {
      out[i] = bfloat16{x[i]};
      const auto high = static_cast<float>(out[i]);
      // The rest of an infinite number would be NaN.
      out[count + i] = bfloat16{is_finite(high) ? x[i] - high : 0.0F};
    }
    std::fill(out + 2 * count, out + padded * width, bfloat16{});
    numbers = out;
  }

  std::size_t rows;
  std::size_t padded;
  const bfloat16* numbers;  // [padded, width]
};

/// y [rows, count] = x Wᵀ + keep * y for the rows [first, first + count) of W, by bfloat16 products.
void split_product(const SplitRows& x, const WeightMatrix& weight, std::size_t first,
                   std::size_t count, float keep, float* y, std::size_t stride) {
  const std::size_t inputs = weight.columns();
  const bfloat16* numbers = nullptr;
  if (weight.format() == WeightFormat::bfloat16) {
    numbers = weight.row<bfloat16>(first);
  } else {
    // Codes of int8 are whole numbers up to 127, whose floats have nothing in the lower half to round.
    const std::int8_t* codes = weight.row<std::int8_t>(first);
    bfloat16* converted = scratch<bfloat16, 1>(count * inputs);
    for (std::size_t i = 0; i < count * inputs; ++i) {
      converted[i].bits =
          static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(codes[i])) >> 16);
    }
    numbers = converted;
  }
  float* sums = scratch<float, 2>(x.padded * count);
  multiply_bfloat16(x.numbers, x.padded, numbers, count, inputs, sums);
  const auto scales = weight.scales();
  for (std::size_t row = 0; row < x.rows; ++row, y += stride) {
    const float* high = sums + row * count;
    const float* low = high + x.rows * count;
    const auto write = [&](auto value) {
      if (keep == 0.0F) {
        for (std::size_t i = 0; i < count; ++i) y[i] = value(i);
      } else {
        for (std::size_t i = 0; i < count; ++i) y[i] = value(i) + keep * y[i];
      }
    };
    if (scales.empty()) {
      write([=](std::size_t i) { return high[i] + low[i]; });
    } else {
      write([=](std::size_t i) { return (high[i] + low[i]) * scales[first + i]; });
    }
  }
}

/// Calls visit(first, count, numbers) for rows of a weight as float: all at once if they are stored so.
template <class Visit>
void for_each_float_slice(const WeightMatrix& weight, std::size_t first, std::size_t count,
                          Visit&& visit) {
  if (weight.format() == WeightFormat::float32) return visit(first, count, weight.row<float>(first));
  const std::size_t most = std::max<std::size_t>(1, most_converted / std::max<std::size_t>(1, weight.columns()));
  for (std::size_t at = first; at < first + count; at += most) {
    const std::size_t part = std::min(most, first + count - at);
    float* numbers = scratch<float, 3>(part * weight.columns());
    weight.copy_rows(at, part, numbers);
    visit(at, part, static_cast<const float*>(numbers));
  }
}

bool is_narrow(const WeightMatrix& weight) {
  return weight.format() == WeightFormat::bfloat16 || weight.format() == WeightFormat::int8;
}

/// y [rows, count] = x Wᵀ + keep * y for the rows [first, first + count) of W, by float products.
void float_product(const float* x, std::size_t rows, const WeightMatrix& weight, std::size_t first,
                   std::size_t count, float keep, float* y, std::size_t stride) {
  for_each_float_slice(weight, first, count,
                       [&](std::size_t at, std::size_t part, const float* numbers) {
                         multiply(rows_of(x, rows, weight.columns()),
                                  rows_of(numbers, part, weight.columns(), true), 1.0F, keep,
                                  y + (at - first), stride);
                       });
}

/// y [rows, outputs] = x [rows, inputs] Wᵀ + keep * y for each layer.
void forward_products(std::span<const LinearResult> layers, const float* x, std::size_t rows,
                      std::span<const float> keep) {
  if (rows == 0) return;
  const bool few = has_row_product() && rows <= most_few_rows;
  const std::size_t slice = few ? few_rows_slice : many_rows_slice;
  std::size_t weights = 0;
  bool narrow = false;
  struct Slice {
    std::size_t layer, first;
  };
  std::vector<Slice> slices;
  for (std::size_t i = 0; i < layers.size(); ++i) {
    const WeightMatrix& weight = layers[i].layer->weight;
    weights += weight.size();
    narrow = narrow || is_narrow(weight);
    for (std::size_t at = 0; at < weight.rows(); at += slice) slices.push_back({i, at});
  }
  std::optional<SplitRows> split;
  if (!few && narrow && multiplies_bfloat16()) split.emplace(x, rows, layers.front().layer->inputs());
  const bool threads = weights >= min_shared_weights && (few || one_thread_per_product);
  for_each_block(slices.size(), 1, threads, [&](std::size_t i, std::size_t) {
    const auto& [layer, y] = layers[slices[i].layer];
    const std::size_t first = slices[i].first;
    const std::size_t outputs = layer->outputs();
    const std::size_t count = std::min(slice, outputs - first);
    const float kept = keep[slices[i].layer];
    if (few) {
      multiply_rows(x, rows, layer->weight, first, count, kept, y + first, outputs);
    } else if (split && is_narrow(layer->weight)) {
      split_product(*split, layer->weight, first, count, kept, y + first, outputs);
    } else {
      float_product(x, rows, layer->weight, first, count, kept, y + first, outputs);
    }
  });
}

/// dx [rows, inputs] = dy [rows, outputs] W + keep * dx.
void back_product(const float* dy, std::size_t rows, const WeightMatrix& weight, float keep,
                  float* dx) {
  if (rows == 0) return;
  for_each_float_slice(weight, 0, weight.rows(),
                       [&](std::size_t first, std::size_t count, const float* numbers) {
                         MatrixView some = rows_of(dy + first, rows, count);
                         some.stride = weight.rows();
                         multiply(some, rows_of(numbers, count, weight.columns()), 1.0F,
                                  first == 0 ? keep : 1.0F, dx, weight.columns());
                       });
}

}  // namespace

void apply_all(std::initializer_list<LinearResult> layers, const float* x, std::size_t rows) {
  std::array<float, 4> keep{};
  require<ShapeError>(layers.size() <= keep.size(), "apply_all: ", layers.size(),
                      " layers, must be at most ", keep.size());
  std::size_t i = 0;
  for (const auto& [layer, y] : layers) {
    // The bias is written first and the product added to it, which saves a pass over y.
    for (std::size_t row = 0; row < rows && !layer->bias.empty(); ++row) {
      std::ranges::copy(layer->bias, y + row * layer->outputs());
    }
    keep[i++] = layer->bias.empty() ? 0.0F : 1.0F;
  }
  forward_products(layers, x, rows, keep);
}

void Linear::apply(const float* x, std::size_t rows, float* y) const {
  apply_all({{this, y}}, x, rows);
}

void Linear::add_to(const float* x, std::size_t rows, float* y) const {
  for (std::size_t row = 0; row < rows && !bias.empty(); ++row) {
    for (std::size_t i = 0; i < outputs(); ++i) y[row * outputs() + i] += bias[i];
  }
  const LinearResult result{this, y};
  constexpr float keep = 1.0F;
  forward_products({&result, 1}, x, rows, {&keep, 1});
}

void Linear::back(const float* dy, std::size_t rows, float* dx) const {
  back_product(dy, rows, weight, 0.0F, dx);
}

void Linear::add_back(const float* dy, std::size_t rows, float* dx) const {
  back_product(dy, rows, weight, 1.0F, dx);
}

}  // namespace kvpolicy::reference
