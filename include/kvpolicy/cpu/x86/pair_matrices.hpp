// SPDX-License-Identifier: Apache-2.0
//
// Matrices of bfloat16 as the processor's units need them: two neighbours along the summed dimension share
// one word, the earlier one in its low half.
#pragma once

#include <cstddef>
#include <cstdint>

namespace kvpolicy::cpu::x86 {

/// The factors of a product: a [rows, pairs] and b [pairs, columns], strides counted in pairs. A product
/// may have several terms, each with its own a or b, which are added.
struct PairMatrices {
  const std::uint32_t* a;
  std::size_t a_row;
  std::size_t a_step;  ///< from one pair to the next
  std::size_t a_term;
  const std::uint32_t* b;
  std::size_t b_row;
  std::size_t b_term;
  std::size_t pairs;
  std::size_t terms;
};

/// The target of a product: c = scale * (a b) or, with `onto`, c += a b.
struct ProductTarget {
  float* c;
  std::size_t c_row;
  bool onto;
  float scale;
};

}  // namespace kvpolicy::cpu::x86
