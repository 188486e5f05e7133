// SPDX-License-Identifier: Apache-2.0
//
// Finds the highest numbers of a table. Many of them may be equal: published gates and scores have many
// ties. The table is in the order of layers and heads, so a rule that prefers the first entries of a tie
// would favour the lowest layers and give nothing to the upper ones.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace kvpolicy {

/// The highest of some numbers, and the tie at the cut, if there is one.
struct Highest {
  std::vector<std::size_t> indices;  ///< indices of the highest numbers, ascending
  std::size_t tied = 0;              ///< Size of a tie of which only some entries are taken; 0: no tie.
  std::size_t tied_in = 0;           ///< How many entries of the tie are taken.
};

/// The `count` highest of `numbers`, none of which is NaN. If the cut falls into a tie, every n-th entry of
/// the tie is taken, so each run of neighbouring entries gets its proportional number to within one.
[[nodiscard]] inline Highest highest(std::span<const double> numbers, std::size_t count) {
  Highest found;
  count = std::min(count, numbers.size());
  if (count == 0) return found;
  std::vector<double> sorted(numbers.begin(), numbers.end());
  const auto last = sorted.begin() + static_cast<std::ptrdiff_t>(count - 1);
  std::ranges::nth_element(sorted, last, std::ranges::greater{});
  const double cut = *last;
  const auto equal = static_cast<std::size_t>(std::ranges::count(numbers, cut));
  const auto above =
      static_cast<std::size_t>(std::ranges::count_if(numbers, [&](double number) { return number > cut; }));
  const std::size_t room = count - above;
  if (room < equal) found = {{}, equal, room};
  // How many of the first i entries of the tie are taken, rounded to the nearest.
  const auto in_of_first = [&](std::size_t i) { return (i * room + equal / 2) / equal; };
  std::size_t met = 0;
  for (std::size_t place = 0; place < numbers.size(); ++place) {
    if (numbers[place] < cut) continue;
    if (numbers[place] == cut) {
      ++met;
      if (in_of_first(met) == in_of_first(met - 1)) continue;
    }
    found.indices.push_back(place);
  }
  return found;
}

}  // namespace kvpolicy
