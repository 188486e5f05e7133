// SPDX-License-Identifier: Apache-2.0
//
// Chooses the unit of the processor that multiplies the queries of a prompt with rows stored in bfloat16,
// by how exact the products must be.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/cpu/x86/amx.hpp>
#include <kvpolicy/cpu/x86/bfloat16_vectors.hpp>

namespace kvpolicy::cpu {

enum class MatrixUnit : std::uint8_t {
  float_vectors,     ///< Multiply-adds in float.
  bfloat16_vectors,  ///< Pairs of bfloat16, summed in float (AVX512-BF16).
  tiles              ///< The same, for 16 x 16 sums at once (AMX).
};

[[nodiscard]] constexpr std::string_view name_of(MatrixUnit unit) noexcept {
  switch (unit) {
    case MatrixUnit::float_vectors: return "float vectors";
    case MatrixUnit::bfloat16_vectors: return "bfloat16 vectors";
    case MatrixUnit::tiles: return "tiles";
  }
  return "unknown";
}

/// The fastest unit that this process may use, determined once from the processor. The first call asks the
/// system for AMX tiles; a refusal is not an error. An engine makes that call only for a call with more
/// queries than decoding has. Thread-safe.
[[nodiscard]] inline MatrixUnit matrix_unit() noexcept {
  if (x86::AmxTiles::available()) return MatrixUnit::tiles;
  return x86::BFloat16Vectors::pay() ? MatrixUnit::bfloat16_vectors : MatrixUnit::float_vectors;
}

/// When a call of many queries may multiply in bfloat16. Rows in float are never multiplied so. Rows stored in
/// bfloat16, and codes of quantised rows with one scale each, are exact; so are rows in half, in two terms (only
/// with tiles). Of other quantised rows, keys are split into two terms (error 2^-16 of each number; only with
/// tiles), and values into as many as weights; where weights are rounded, they are as well, which the bound of an
/// output below includes. Of two terms on both sides the product of the second ones is left out (2^-16 of each
/// product), but for keys in half. Sums are in float, and subnormal numbers count as zeros. A factor that must be
/// more exact is split into two bfloat16 terms, which costs a second product.
enum class Bfloat16Products : std::uint8_t {
  never,
  /// As far as the types of queries and outputs allow no more precision. Queries in bfloat16 are exact;
  /// others are split into two terms (error 2^-16 of each number). The softmax's weights are rounded if
  /// outputs are bfloat16: the error of an output is at most 2^-8 times the mean magnitude, by those
  /// weights, of the values (for a quantised row with one scale: of the range from its least code to its
  /// largest; for rotated rows: before they are rotated back), about as much as the rounding of the output
  /// itself. Otherwise weights are split into two terms (2^-16). Two terms are only used with tiles.
  where_exact,
  /// Queries and weights are always rounded. In addition to the errors above, the error of a logit is at
  /// most 2^-8 times the sum of the magnitudes of its products, scaled.
  always
};

/// How the products of one call are computed.
struct ProductPlan {
  MatrixUnit unit = MatrixUnit::float_vectors;
  std::size_t query_terms = 1;
  std::size_t rotated_terms = 1;  ///< for queries that a segment rotates
  std::size_t weight_terms = 1;

  constexpr ProductPlan() = default;
  /// `best` is the unit to use if the numbers allow it.
  constexpr ProductPlan(Bfloat16Products allowed, MatrixUnit best, Encoding queries, Encoding out) {
    if (allowed == Bfloat16Products::never) return;
    const auto terms = [&](Encoding encoding) -> std::size_t {
      return allowed == Bfloat16Products::always || encoding == Encoding::bfloat16 ? 1 : 2;
    };
    query_terms = terms(queries);
    rotated_terms = terms(Encoding::float32);
    weight_terms = terms(out);
    // Vectors compute two bfloat16 products in the time of one in float, so two terms do not pay.
    if (best == MatrixUnit::tiles || query_terms + weight_terms == 2) unit = best;
  }
  [[nodiscard]] constexpr bool is_narrow() const { return unit != MatrixUnit::float_vectors; }
  [[nodiscard]] constexpr bool pays(std::size_t terms) const {
    return unit == MatrixUnit::tiles || (is_narrow() && terms == 1);
  }
};

}  // namespace kvpolicy::cpu
