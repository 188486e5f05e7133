// SPDX-License-Identifier: Apache-2.0
//
// What the library's own arithmetic makes of groups of numbers: reads the bits and the size of a group, then floats, and
// writes for each group the numbers that its scale, zero and codes stand for. check.py compares them with the reference.
#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <vector>

#include <kvpolicy/storage/quantize.hpp>

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  const auto encoding = std::atoi(argv[1]) == 2   ? kvpolicy::Encoding::uint2
                        : std::atoi(argv[1]) == 4 ? kvpolicy::Encoding::uint4
                                                  : kvpolicy::Encoding::uint8;
  std::vector<float> group(static_cast<std::size_t>(std::atoi(argv[2])));
  while (std::fread(group.data(), sizeof(float), group.size(), stdin) == group.size()) {
    const auto [low, high] = std::minmax_element(group.begin(), group.end());
    const auto grid = kvpolicy::AffineGrid::covering(*low, *high, encoding);
    for (float& number : group) {
      number = static_cast<float>(grid.encode(number, encoding)) * static_cast<float>(grid.scale) +
               static_cast<float>(grid.zero);
    }
    std::fwrite(group.data(), sizeof(float), group.size(), stdout);
  }
}
