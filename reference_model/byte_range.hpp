// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cstddef>

namespace kvpolicy::reference {

/// Bytes of a text: [begin, end).
struct ByteRange {
  std::size_t begin = 0;
  std::size_t end = 0;

  friend bool operator==(ByteRange, ByteRange) = default;
};

}  // namespace kvpolicy::reference
