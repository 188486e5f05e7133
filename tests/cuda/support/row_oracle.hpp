// SPDX-License-Identifier: Apache-2.0
//
// What the tests of row-writing kernels share: a group of numbers quantised by storage/quantize.hpp.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include <kvpolicy/storage/quantize.hpp>

namespace test {

struct QuantizedGroup {
  kvpolicy::AffineGrid grid;
  std::vector<std::uint32_t> codes;

  QuantizedGroup(std::vector<float> numbers, kvpolicy::Encoding encoding) {
    for (float& x : numbers) x = std::isnan(x) ? 0.0F : std::clamp(x, -65504.0F, 65504.0F);
    const auto [min, max] = std::ranges::minmax(numbers);
    grid = kvpolicy::AffineGrid::covering(min, max, encoding);
    for (const float x : numbers) codes.push_back(grid.encode(x, encoding));
  }
};

}  // namespace test
