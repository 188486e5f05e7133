// SPDX-License-Identifier: Apache-2.0
//
// The shape of a product of bfloat16 activations and weights: y [rows, outputs] = x [rows, inputs]
// Wᵀ + b.
#pragma once

#include <compare>
#include <cstddef>

namespace kvpolicy::reference {

struct ProductShape {
  std::size_t inputs = 0;
  std::size_t outputs = 0;
  std::size_t rows = 0;
  bool bias = false;     ///< has one, of y's type
  bool rounded = false;  ///< y is bfloat16, else float
  bool added = false;    ///< computes y += instead of y =
  friend auto operator<=>(const ProductShape&, const ProductShape&) = default;
};

}  // namespace kvpolicy::reference
