// SPDX-License-Identifier: Apache-2.0
//
// Which places of a table hold its highest numbers, where many of them are equal: published gates
// and scores are full of ties. Places of a table are in the order of layers and heads, so whoever
// gives a tie's last places to the first of it gives them to the lowest layers, and the upper ones
// get none.
#pragma once

#include <algorithm>
#include <cstddef>
#include <functional>
#include <span>
#include <vector>

namespace kvpolicy {

/// The highest of some numbers, and the tie that the cut falls into, if it does.
struct Highest {
  std::vector<std::size_t> places;  ///< ascending
  std::size_t tied = 0;     ///< Equal numbers of which some are in and some are not; 0: no tie.
  std::size_t tied_in = 0;  ///< How many of them are in.
};

/// The `count` highest of `numbers`, none of which is NaN. Of a tie that the cut falls into every
/// n-th place is taken, so that each run of neighbouring places gets its part to within one.
[[nodiscard]] inline Highest highest(std::span<const double> numbers, std::size_t count) {
  Highest found;
  count = std::min(count, numbers.size());
  if (count == 0) return found;
  std::vector<double> sorted(numbers.begin(), numbers.end());
  const auto last = sorted.begin() + static_cast<std::ptrdiff_t>(count - 1);
  std::ranges::nth_element(sorted, last, std::ranges::greater{});
  const double cut = *last;
  const auto equal = static_cast<std::size_t>(std::ranges::count(numbers, cut));
  const auto above = static_cast<std::size_t>(
      std::ranges::count_if(numbers, [&](double number) { return number > cut; }));
  const std::size_t room = count - above;
  if (room < equal) found = {{}, equal, room};
  // Of the first i of the tie so many are in, rounded to the nearest.
  const auto in_of_first = [&](std::size_t i) { return (i * room + equal / 2) / equal; };
  std::size_t met = 0;
  for (std::size_t place = 0; place < numbers.size(); ++place) {
    if (numbers[place] < cut) continue;
    if (numbers[place] == cut) {
      ++met;
      if (in_of_first(met) == in_of_first(met - 1)) continue;
    }
    found.places.push_back(place);
  }
  return found;
}

}  // namespace kvpolicy
