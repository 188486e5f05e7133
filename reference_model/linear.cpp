// SPDX-License-Identifier: Apache-2.0
#include <reference_model/linear.hpp>

#include <algorithm>
#include <array>
#include <bit>
#include <cstdint>
#include <optional>
#include <span>
#include <vector>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>
#include <kvpolicy/cpu/aligned_buffer.hpp>
#include <reference_model/library_product.hpp>
#include <reference_model/parallel.hpp>
#include <reference_model/row_product.hpp>

namespace kvpolicy::reference {
namespace {

/// Two threads take longer to meet than one takes to read fewer weights than this, or to multiply fewer numbers.
constexpr std::size_t min_shared_weights = std::size_t{1} << 18;
constexpr std::size_t min_shared_products = std::size_t{1} << 22;

/// Rows of a weight that one thread multiplies at once. With few rows of x a slice takes some microseconds;
/// with many, its weights fit the second level cache.
constexpr std::size_t few_rows_slice = 64;
constexpr std::size_t many_rows_slice = 256;

/// Products of packed weights have numbers of rows that are multiples of this, so there are few different ones.
constexpr std::size_t row_step = 32;

/// Numbers of a weight that are converted to float at once, also for that cache.
constexpr std::size_t most_converted = std::size_t{1} << 17;

MatrixView rows_of(const float* x, std::size_t rows, std::size_t width, bool transposed = false) {
  return {.data = x, .rows = rows, .columns = width, .stride = width, .transposed = transposed};
}

/// Memory that a thread keeps between products, aligned because AMX reads whole cache lines several times as fast.
/// Its contents are undefined.
template <class Number, int Use>
Number* scratch(std::size_t count) {
  thread_local cpu::AlignedBuffer<Number> memory;
  return memory.resize(count);
}

/// x in two terms: x = high + low with an error of at most 2^-16 of each number; or rounded, in one. After the last
/// row there are zeros up to a multiple of row_step.
struct SplitRows {
  SplitRows(const float* x, std::size_t rows, std::size_t width_, bool in_one_term, bool threads)
      : width{width_} {
    const std::size_t padded = (rows + row_step - 1) / row_step * row_step;
    bfloat16* out = scratch<bfloat16, 0>((in_one_term ? 1 : 2) * padded * width);
    high = out;
    std::fill(out + rows * width, out + padded * width, bfloat16{});
    if (in_one_term) {
      for_each_block(rows, row_step, threads, [&](std::size_t first, std::size_t count) {
        for (std::size_t i = first * width; i < (first + count) * width; ++i) out[i] = bfloat16{x[i]};
      });
      return;
    }
    bfloat16* rest = out + padded * width;
    for_each_block(rows, row_step, threads, [&](std::size_t first, std::size_t count) {
      for (std::size_t i = first * width; i < (first + count) * width; ++i) {
        out[i] = bfloat16{x[i]};
        const auto rounded = static_cast<float>(out[i]);
        // The rest of an infinite number would be NaN.
        rest[i] = bfloat16{is_finite(rounded) ? x[i] - rounded : 0.0F};
      }
    });
    std::fill(rest + rows * width, rest + padded * width, bfloat16{});
    low = rest;
  }

  /// y [count, outputs] = the rows [first, first + count) times a weight.
  void multiply(std::size_t first, std::size_t count, const PackedWeight& weight, float* y) const {
    weight.multiply(high + first * width, count, false, y);
    if (low != nullptr) weight.multiply(low + first * width, count, true, y);
  }

  std::size_t width;
  const bfloat16* high = nullptr;
  const bfloat16* low = nullptr;  // null: x was rounded
};

/// Codes of int8 are whole numbers up to 127, whose floats have nothing in the lower half to round.
const bfloat16* to_bfloat16(const std::int8_t* codes, std::size_t count) {
  bfloat16* converted = scratch<bfloat16, 1>(count);
  for (std::size_t i = 0; i < count; ++i) {
    converted[i].bits =
        static_cast<std::uint16_t>(std::bit_cast<std::uint32_t>(static_cast<float>(codes[i])) >> 16);
  }
  return converted;
}

/// The rows [first, first + count) of a weight of bfloat16 or int8.
const bfloat16* as_bfloat16(const WeightMatrix& weight, std::size_t first, std::size_t count) {
  return weight.format() == WeightFormat::bfloat16
             ? weight.row<bfloat16>(first)
             : to_bfloat16(weight.row<std::int8_t>(first), count * weight.columns());
}

/// y [rows, count] = x Wᵀ for the rows [first, first + count) of W, + y if `add`, by products of bfloat16.
void split_product(const SplitRows& x, std::size_t rows, const WeightMatrix& weight, std::size_t first,
                   std::size_t count, bool add, float* y, std::size_t stride) {
  thread_local PackedWeight packed;
  packed.pack(as_bfloat16(weight, first, count), count, weight.columns());
  const auto scales = weight.scales();
  float* sums = scratch<float, 2>(PackedWeight::most_rows * count);
  for (std::size_t begin = 0; begin < rows; begin += PackedWeight::most_rows) {
    const std::size_t some = std::min(PackedWeight::most_rows, rows - begin);
    x.multiply(begin, (some + row_step - 1) / row_step * row_step, packed, sums);
    for (std::size_t row = 0; row < some; ++row) {
      float* to = y + (begin + row) * stride;
      const float* from = sums + row * count;
      if (!scales.empty()) {
        for (std::size_t i = 0; i < count; ++i) to[i] = from[i] * scales[first + i] + (add ? to[i] : 0.0F);
      } else if (add) {
        for (std::size_t i = 0; i < count; ++i) to[i] += from[i];
      } else {
        std::copy_n(from, count, to);
      }
    }
  }
}

/// Calls visit(first, count, numbers) for rows of a weight as float: all at once if they are stored so.
template <class Visit>
void for_each_float_slice(const WeightMatrix& weight, std::size_t first, std::size_t count, Visit&& visit) {
  if (weight.format() == WeightFormat::float32) return visit(first, count, weight.row<float>(first));
  const std::size_t most =
      std::max<std::size_t>(1, most_converted / std::max<std::size_t>(1, weight.columns()));
  if (count == 0) return;
  // Equal parts of whole vectors: a product with a few rows left over is slow.
  const std::size_t parts = (count + most - 1) / most;
  const std::size_t even = (count + parts - 1) / parts;
  const std::size_t share = (even + 15) / 16 * 16;
  for (std::size_t at = first; at < first + count; at += share) {
    const std::size_t part = std::min(share, first + count - at);
    float* numbers = scratch<float, 3>(part * weight.columns());
    weight.copy_rows(at, part, numbers);
    visit(at, part, static_cast<const float*>(numbers));
  }
}

bool is_narrow(const WeightMatrix& weight) {
  return weight.format() == WeightFormat::bfloat16 || weight.format() == WeightFormat::int8;
}

/// y [rows, count] = x Wᵀ for the rows [first, first + count) of W, + y if `add`, by float products.
void float_product(const float* x, std::size_t rows, const WeightMatrix& weight, std::size_t first,
                   std::size_t count, bool add, float* y, std::size_t stride) {
  for_each_float_slice(weight, first, count, [&](std::size_t at, std::size_t part, const float* numbers) {
    multiply(rows_of(x, rows, weight.columns()), rows_of(numbers, part, weight.columns(), true), 1.0F,
             add ? 1.0F : 0.0F, y + (at - first), stride);
  });
}

/// A product that forward_products computes: y = x Wᵀ + y if `add`.
struct Forward {
  const Linear* layer;
  float* y;
  bool add;
};

/// y [rows, outputs] = x [rows, inputs] Wᵀ for each layer, + y if it is to be added.
void forward_products(std::span<const Forward> products, const float* x, std::size_t rows) {
  if (rows == 0) return;
  const bool few = has_row_product() && rows <= most_few_rows;
  const std::size_t slice = few ? few_rows_slice : many_rows_slice;
  std::size_t weights = 0;
  bool narrow = false;
  bool rounded = true;
  struct Slice {
    const Forward* product;
    std::size_t first;
  };
  std::vector<Slice> slices;
  for (const Forward& product : products) {
    const WeightMatrix& weight = product.layer->weight;
    weights += weight.size();
    narrow = narrow || is_narrow(weight);
    rounded = rounded && product.layer->round_activations;
    for (std::size_t at = 0; at < weight.rows(); at += slice) slices.push_back({&product, at});
  }
  const bool threads =
      few ? weights >= min_shared_weights : one_thread_per_product && weights * rows >= min_shared_products;
  std::optional<SplitRows> split;
  if (!few && narrow && multiplies_bfloat16()) {
    split.emplace(x, rows, products.front().layer->inputs(), rounded, threads);
  }
  for_each_block(slices.size(), 1, threads, [&](std::size_t i, std::size_t) {
    const auto& [layer, y, add] = *slices[i].product;
    const std::size_t first = slices[i].first;
    const std::size_t outputs = layer->outputs();
    const std::size_t count = std::min(slice, outputs - first);
    if (few) {
      multiply_rows(x, rows, layer->weight, first, count, add ? 1.0F : 0.0F, y + first, outputs);
    } else if (split && is_narrow(layer->weight)) {
      split_product(*split, rows, layer->weight, first, count, add, y + first, outputs);
    } else {
      float_product(x, rows, layer->weight, first, count, add, y + first, outputs);
    }
  });
}

/// dx [rows, inputs] = dy [rows, outputs] W + keep * dx.
void back_product(const float* dy, std::size_t rows, const WeightMatrix& weight, float keep, float* dx) {
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
  std::array<Forward, 4> products{};
  require<ShapeError>(layers.size() <= products.size(), "apply_all: ", layers.size(),
                      " layers, must be at most ", products.size());
  std::size_t i = 0;
  for (const auto& [layer, y] : layers) {
    // The bias is written first and the product added to it, which saves a pass over y.
    for (std::size_t row = 0; row < rows && !layer->bias.empty(); ++row) {
      std::ranges::copy(layer->bias, y + row * layer->outputs());
    }
    products[i++] = {layer, y, !layer->bias.empty()};
  }
  forward_products({products.data(), i}, x, rows);
}

void Linear::apply(const float* x, std::size_t rows, float* y) const { apply_all({{this, y}}, x, rows); }

void Linear::add_to(const float* x, std::size_t rows, float* y) const {
  for (std::size_t row = 0; row < rows && !bias.empty(); ++row) {
    for (std::size_t i = 0; i < outputs(); ++i) y[row * outputs() + i] += bias[i];
  }
  const Forward product{this, y, true};
  forward_products({&product, 1}, x, rows);
}

void Linear::back(const float* dy, std::size_t rows, float* dx) const {
  back_product(dy, rows, weight, 0.0F, dx);
}

void Linear::add_back(const float* dy, std::size_t rows, float* dx) const {
  back_product(dy, rows, weight, 1.0F, dx);
}

}  // namespace kvpolicy::reference
