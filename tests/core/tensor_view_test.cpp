// SPDX-License-Identifier: Apache-2.0
//
// Views are made from any integers that an engine counts in.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/core/tensor_view.hpp>

#include "support/compare.hpp"

using namespace kvpolicy;

namespace {

// Readers of a view must not see which integers it was made from.
template <class Integer>
void check_counts() {
  std::vector<float> data(2 * 3 * 64);
  const Integer tokens = 2, heads = 3, head_dim = 64, token_stride = 100, head_stride = 70;
  const TensorView<float> view{data.data(), tokens, heads, head_dim};
  CHECK(view.tokens == 2);
  CHECK(view.heads == 3);
  CHECK(view.head_dim == 64);
  CHECK(view.token_stride == 192);
  CHECK(view.head_stride == 64);
  CHECK(view.row(1, 2) == data.data() + 192 + 128);
  const TensorView strided{
      static_cast<const float*>(data.data()), tokens, heads, head_dim, token_stride, head_stride};
  CHECK(strided.row(1, 1) == data.data() + 170);
}

constexpr float one_number = 0;
static_assert(TensorView<const float>{&one_number, 1, 1U, std::int64_t{1}}.head_dim == 1);

}  // namespace

TEST_CASE("a view can be made from any integers") {
  check_counts<int>();
  check_counts<unsigned>();
  check_counts<std::int64_t>();
  check_counts<std::size_t>();
  check_counts<std::int8_t>();
}

TEST_CASE("a negative number is refused") {
  std::vector<float> data(64);
  const auto said = [&](int tokens, int heads, int head_dim, int token_stride, int head_stride) {
    return test::thrown<ShapeError>([&] {
      const TensorView view{data.data(), tokens, heads, head_dim, token_stride, head_stride};
      static_cast<void>(view);
    });
  };
  CHECK(said(1, 1, 64, 64, 64).empty());
  CHECK(said(0, 0, 0, 0, 0).empty());
  CHECK(test::contains(said(-1, 1, 64, 64, 64), "is -1, must not be negative"));
  CHECK(test::contains(said(1, -2, 64, 64, 64), "is -2"));
  CHECK(test::contains(said(1, 1, -64, 64, 64), "is -64"));
  CHECK(test::contains(said(1, 1, 64, -3, 64), "is -3"));
  CHECK(test::contains(said(1, 1, 64, 64, -2147483647 - 1), "is -2147483648"));
  CHECK(!test::thrown<ShapeError>([&] { static_cast<void>(TensorView{data.data(), -1, 1, 64}); }).empty());
}
