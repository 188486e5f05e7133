// SPDX-License-Identifier: Apache-2.0
//
// What model and caches over ranks have to agree about: the order of a rank's heads, and the shards themselves.
#pragma once

#include <algorithm>
#include <cstddef>
#include <cstdint>
#include <vector>

#include <kvpolicy/plan/shards.hpp>
#include <kvpolicy/state/archive.hpp>

namespace kvpolicy::reference {

/// The parts that a rank holds of a layer, in the order in which its tensors have their heads: whole ones, then cut
/// ones.
[[nodiscard]] inline std::vector<HeadPart> parts_in_order(const Shards& shards, std::size_t layer,
                                                          std::size_t rank) {
  const auto parts = shards.parts(layer, rank);
  std::vector<HeadPart> order{parts.begin(), parts.end()};
  std::stable_partition(order.begin(), order.end(),
                        [](const HeadPart& part) { return part.rows.is_whole(); });
  return order;
}

/// Tells shards from others.
[[nodiscard]] inline std::uint64_t digest_of(const Shards& shards) {
  std::vector<std::uint64_t> numbers{shards.ranks(), shards.layers()};
  for (std::size_t layer = 0; layer < shards.layers(); ++layer) {
    for (std::size_t rank = 0; rank < shards.ranks(); ++rank) {
      for (const HeadPart& part : shards.parts(layer, rank)) {
        numbers.insert(numbers.end(), {layer, rank, part.head, part.rows.begin, part.rows.end});
      }
    }
  }
  return digest(numbers);
}

}  // namespace kvpolicy::reference
