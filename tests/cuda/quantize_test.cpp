// SPDX-License-Identifier: Apache-2.0
//
// What the kernels make of numbers that are hard to quantise: bit for bit what the host makes of
// them.
#include <doctest/doctest.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdint>
#include <limits>
#include <memory>
#include <vector>

#include <kvpolicy/cuda/kernels/append.cuh>
#include <kvpolicy/storage/residual_storage.hpp>

#include "cuda/support/codes.hpp"
#include "cuda/support/launch.hpp"
#include "cuda/support/written_head.hpp"
#include "support/compare.hpp"
#include "support/tensors.hpp"

using kvpolicy::Encoding;
using kvpolicy::gpu::AppendParams;
using kvpolicy::gpu::HeadView;
using kvpolicy::gpu::LayerState;
using test::all_codes;
using test::below;
using test::Codes;
using test::launch;
using test::Random;
using test::Side;
using test::WrittenHead;

namespace {

// One head that quantises all it gets, in one call of 64 rows.
template <class E, int HeadDim>
void check_quantized(const std::vector<std::vector<float>>& rows, const Codes& codes, bool per_channel,
                     int key_group, int value_group, int expected_out_of_range, bool rotated = false) {
  HeadView view;
  codes.describe(view);
  view.key_per_channel = per_channel;
  view.key_group = key_group;
  view.value_group = value_group;
  view.key_hadamard = view.value_hadamard = rotated;
  view.residual = 0;
  view.exact_ring = 64;
  WrittenHead<E> head{view, HeadDim, 64, 64};
  std::vector<std::uint16_t> numbers;
  for (const auto& row : rows) {
    for (const float x : row) numbers.push_back(E{x}.bits);
  }
  head.text[0] = head.text[1] = numbers;
  const kvpolicy::gpu::Tensor tensor{reinterpret_cast<std::byte*>(numbers.data()), 0, HeadDim, 0};
  const std::vector<HeadView> views{head.memory.view()};
  std::vector<LayerState> states(1);
  std::vector<std::uint32_t> tickets(1, 0);
  const auto out_of_range = std::make_unique<int>(0);
  const AppendParams params{.heads = views.data(),
                            .states = states.data(),
                            .kv_heads = 1,
                            .rows = 64,
                            .commit_rows = 64,
                            .k = tensor,
                            .v = tensor,
                            .tickets = tickets.data(),
                            .out_of_range = out_of_range.get()};
  launch(kvpolicy::gpu::append_kernel<E, HeadDim>, 1, 1, kvpolicy::gpu::write_threads,
         kvpolicy::gpu::append_shared_bytes<HeadDim>(), params);
  head.check_packed(Side::keys, 64);
  head.check_packed(Side::values, 64);
  CHECK(*out_of_range == expected_out_of_range);
}

// In every grouping.
template <class E, int HeadDim>
void check_quantized(const std::vector<std::vector<float>>& rows, int unrepresentable = 0,
                     bool rotated = false) {
  for (const Codes& codes : all_codes) {
    CAPTURE(name_of(codes));
    for (int group = 8; group <= HeadDim; group *= 2) {
      CAPTURE(group);
      check_quantized<E, HeadDim>(rows, codes, false, group, HeadDim / (group / 8), 2 * unrepresentable,
                                  rotated);
    }
    for (const int group : {16, 32, 64}) {
      check_quantized<E, HeadDim>(rows, codes, true, group, HeadDim, 2 * unrepresentable, rotated);
    }
  }
}

// 64 rows of numbers that are hard to quantise.
std::vector<std::vector<float>> hard_rows(Random& random, int head_dim, bool with_unrepresentable,
                                          int& unrepresentable) {
  std::vector<std::vector<float>> rows;
  for (int row = 0; row < 64; ++row) {
    const float constant = test::normal(random);
    std::vector<float> numbers;
    for (int c = 0; c < head_dim; ++c) {
      const float x = test::normal(random);
      const float kinds[] = {
          x,
          constant,
          x * 1e-7F,   // half's denormals
          x * 1e-39F,  // bfloat16's
          x < 0 ? -65504.0F : 65504.0F,
          -1000.0F - 100 * std::abs(x),
          c == row ? 60000.0F : x,
          x < 0 ? -0.0F : 0.0F,
          std::round(4 * x) / 8,  // halves between codes
      };
      numbers.push_back(kinds[row % 9]);
      // bfloat16 has 65536 next to 65280, and nothing between.
      if (std::abs(numbers.back()) > 65280.0F && !with_unrepresentable) {
        numbers.back() = std::copysign(65280.0F, numbers.back());
      }
    }
    rows.push_back(std::move(numbers));
  }
  unrepresentable = 0;
  if (with_unrepresentable) {
    const float infinity = std::numeric_limits<float>::infinity();
    for (auto& row : rows) {
      for (float& x : row) x = std::clamp(x, -60000.0F, 60000.0F);
    }
    for (const float x : {infinity, -infinity, std::numeric_limits<float>::quiet_NaN(), infinity}) {
      rows[below(random, 16) + 16 * static_cast<std::size_t>(unrepresentable)]
          [below(random, static_cast<std::size_t>(head_dim))] = x;
      ++unrepresentable;
    }
  }
  return rows;
}

}  // namespace

TEST_CASE("codes, scales and zeros are bit for bit the host's, also of hard numbers") {
  Random random{7};
  for (const bool with_unrepresentable : {false, true}) {
    CAPTURE(with_unrepresentable);
    int unrepresentable = 0;
    const auto wide = hard_rows(random, 128, with_unrepresentable, unrepresentable);
    check_quantized<kvpolicy::float16, 128>(wide, unrepresentable);
    check_quantized<kvpolicy::bfloat16, 128>(wide, unrepresentable);
    const auto narrow = hard_rows(random, 64, with_unrepresentable, unrepresentable);
    check_quantized<kvpolicy::float16, 64>(narrow, unrepresentable);
    check_quantized<kvpolicy::bfloat16, 64>(narrow, unrepresentable);
  }
  // The largest halves, both signs in a group: a scale of 131008 / levels.
  std::vector<std::vector<float>> largest(64, std::vector<float>(64));
  for (auto& row : largest) {
    for (float& x : row) x = test::normal(random) < 0 ? -65504.0F : 65504.0F;
  }
  check_quantized<kvpolicy::float16, 64>(largest);
}

template <class E, int HeadDim>
void check_rotated(const std::vector<std::vector<float>>& rows) {
  int refused = 0;  // by the host, which looks at rotated numbers
  for (const auto& row : rows) {
    std::vector<float> numbers;
    for (const float x : row) numbers.push_back(static_cast<float>(E{x}));
    kvpolicy::rotate_hadamard(numbers);
    for (const float x : numbers)
      refused += kvpolicy::is_quantizable(std::bit_cast<std::uint32_t>(x)) ? 0 : 1;
  }
  check_quantized<E, HeadDim>(rows, refused, true);
}

TEST_CASE("rotated rows: codes, scales and zeros are bit for bit the host's, and so is what is refused") {
  Random random{8};
  for (const bool with_unrepresentable : {false, true}) {
    CAPTURE(with_unrepresentable);
    int unrepresentable = 0;
    const auto wide = hard_rows(random, 128, with_unrepresentable, unrepresentable);
    check_rotated<kvpolicy::float16, 128>(wide);
    check_rotated<kvpolicy::bfloat16, 128>(wide);
    const auto narrow = hard_rows(random, 64, with_unrepresentable, unrepresentable);
    check_rotated<kvpolicy::float16, 64>(narrow);
    check_rotated<kvpolicy::bfloat16, 64>(narrow);
  }
  std::vector<std::vector<float>> plain(64, std::vector<float>(128));
  for (auto& row : plain) {
    for (float& x : row) x = test::normal(random);
  }
  check_rotated<kvpolicy::float16, 128>(plain);
  check_rotated<kvpolicy::bfloat16, 128>(plain);
}

TEST_CASE("the kernels count exactly the numbers that the host refuses") {
  const auto refused_by_host = [](float x) {
    std::vector<float> row(64, x);
    const kvpolicy::Plane plane{.base = reinterpret_cast<const std::byte*>(row.data()), .row_stride = 256};
    const kvpolicy::ResidualStorage<kvpolicy::bfloat16> storage{{}, {.head_dim = 64}};
    return !test::thrown<kvpolicy::ShapeError>([&] {
              storage.check({.keys = plane, .values = plane, .rows = 1});
            }).empty();
  };
  // Every bfloat16 is tried, and some floats that become one.
  std::vector<float> numbers{65407.0F, 65408.0F, 65450.0F, -65407.0F, -65408.0F, -65504.0F};
  kvpolicy::bfloat16 number;
  for (std::uint32_t bits = 0; bits < 65536; ++bits) {
    number.bits = static_cast<std::uint16_t>(bits);
    numbers.push_back(static_cast<float>(number));
  }
  numbers.resize((numbers.size() + 4095) / 4096 * 4096, 1.0F);
  for (std::size_t first = 0; first < numbers.size(); first += 4096) {
    CAPTURE(first);
    std::vector<std::vector<float>> rows(64, std::vector<float>(64));
    int refused = 0;
    for (std::size_t i = 0; i < 4096; ++i) {
      rows[i / 64][i % 64] = numbers[first + i];
      refused += refused_by_host(numbers[first + i]) ? 1 : 0;
    }
    check_quantized<kvpolicy::bfloat16, 64>(rows, Encoding::uint4, false, 64, 64, 2 * refused);
    check_quantized<kvpolicy::bfloat16, 64>(rows, Encoding::uint4, true, 64, 64, 2 * refused);
  }
}

TEST_CASE("rows of -0 alone are stored as rows of 0 are") {
  for (const float zero : {0.0F, -0.0F}) {
    check_quantized<kvpolicy::float16, 64>(std::vector(64, std::vector(64, zero)));
    check_quantized<kvpolicy::bfloat16, 64>(std::vector(64, std::vector(64, zero)));
  }
}
