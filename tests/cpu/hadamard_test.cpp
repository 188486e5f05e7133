// SPDX-License-Identifier: Apache-2.0
//
// The rotation of rows in vectors gives the bits of the plain one, which core/hadamard_test.cpp judges.
#include <cstddef>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/core/hadamard.hpp>
#include <kvpolicy/cpu/hadamard-inl.hpp>

#include "support/tensors.hpp"

namespace {

TEST_CASE(
    "rows rotated in vectors have the bits of rows rotated plainly, whatever their width and distance") {
  test::Random random{71};
  for (std::size_t channels = 1; channels <= 576; channels += channels < 24 ? 1 : 8) {
    CAPTURE(channels);
    const std::size_t count = test::below(random, 4);
    const std::size_t stride = channels + test::below(random, 20);
    std::vector<float> rows(count * stride + 1);
    for (float& number : rows) number = test::normal(random);
    std::vector<float> expected = rows;
    for (std::size_t row = 0; row < count; ++row) {
      kvpolicy::rotate_hadamard({expected.data() + row * stride, channels});
    }
    kvpolicy::cpu::HWY_NAMESPACE::rotate_rows(rows.data(), count, stride, channels);
    CHECK(rows == expected);  // what lies between rows stays
  }
  kvpolicy::cpu::HWY_NAMESPACE::rotate_rows(nullptr, 0, 0, 128);
  kvpolicy::cpu::HWY_NAMESPACE::rotate_rows(nullptr, 5, 0, 0);
}

}  // namespace
