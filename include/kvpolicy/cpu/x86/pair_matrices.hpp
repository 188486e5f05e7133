// SPDX-License-Identifier: Apache-2.0
//
// Matrices of bfloat16 as the processor's units need them: two neighbours along the summed dimension share
// one word, the earlier one in its low half.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace kvpolicy::cpu::x86 {

/// One product of several that are added: where its factors begin, in pairs after `a` and `b`.
struct ProductTerm {
  std::size_t a = 0;
  std::size_t b = 0;
};
/// The products of a sum of terms with another one.
struct ProductTerms {
  std::array<ProductTerm, 4> terms = {};
  std::size_t count = 0;

  /// Each side has one or two terms, which are `a_step` and `b_step` pairs apart. The product of both second terms
  /// counts if `all`: a second term is below 2^-8 of its first one, so that product is below 2^-16 of theirs.
  ProductTerms(std::size_t a_terms, std::size_t a_step, std::size_t b_terms, std::size_t b_step, bool all) {
    for (std::size_t a = 0; a < a_terms; ++a) {
      for (std::size_t b = 0; b < b_terms && (all || a + b < 2); ++b) {
        terms[count++] = {a * a_step, b * b_step};
      }
    }
  }
};

/// The factors of a product: a [rows, pairs] and b [pairs, columns], strides counted in pairs.
struct PairMatrices {
  const std::uint32_t* a;
  std::size_t a_row;
  std::size_t a_step;  ///< from one pair to the next
  const std::uint32_t* b;
  std::size_t b_row;
  std::size_t pairs;
  ProductTerms terms;
};

/// The target of a product: c = a b or, with `onto`, c += a b.
struct ProductTarget {
  float* c;
  std::size_t c_row;
  bool onto;
};

}  // namespace kvpolicy::cpu::x86
