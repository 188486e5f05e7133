// SPDX-License-Identifier: Apache-2.0
//
// Which unit of the processor multiplies the queries of a prompt with rows stored in bfloat16, and
// how exact that must be.
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
  tiles              ///< The same, 16 x 16 sums at a time (AMX).
};

[[nodiscard]] constexpr std::string_view name_of(MatrixUnit unit) noexcept {
  switch (unit) {
    case MatrixUnit::float_vectors: return "float vectors";
    case MatrixUnit::bfloat16_vectors: return "bfloat16 vectors";
    case MatrixUnit::tiles: return "tiles";
  }
  return "unknown";
}

/// The fastest unit that this process may use; decided once, by what the processor is. Asks the
/// system for tiles at the first call; a refusal is no error. An engine makes that call when it first
/// has more queries than decoding has. Thread-safe.
[[nodiscard]] inline MatrixUnit matrix_unit() noexcept {
  if (x86::AmxTiles::available()) return MatrixUnit::tiles;
  return x86::BFloat16Vectors::pay() ? MatrixUnit::bfloat16_vectors : MatrixUnit::float_vectors;
}

/// When a call of many queries may multiply in bfloat16. Only rows stored in bfloat16 ever are, and
/// the codes of quantised rows with one scale each, neither of which it rounds; sums are float's,
/// subnormal numbers count as zeros. What must stay more exact goes in as the sum of two numbers,
/// which costs a second product.
enum class Bfloat16Products : std::uint8_t {
  never,
  /// As far as the types of queries and outputs have no more to give. Queries in bfloat16 go in
  /// exactly, others as two numbers (off by 2^-16 of each). The softmax's weights are rounded where
  /// outputs are bfloat16: an output is off by at most 2^-8 times the mean magnitude, by those
  /// weights, of the values it is a mean of, about what its own rounding costs (of a
  /// quantised row the range counts, from its least code to its largest). Else they are two numbers
  /// (2^-16). Two numbers only pay in tiles.
  where_exact,
  /// Queries and weights are always rounded: besides the above, a logit is off by at most 2^-8 times
  /// the sum of the magnitudes of its products, scaled.
  always
};

/// How the products of one call are made.
struct ProductPlan {
  MatrixUnit unit = MatrixUnit::float_vectors;
  std::size_t query_terms = 1;
  std::size_t turned_terms = 1;  ///< of queries that a segment's rotation turned
  std::size_t weight_terms = 1;

  constexpr ProductPlan() = default;
  /// `best` is the unit to use where numbers allow it.
  constexpr ProductPlan(Bfloat16Products allowed, MatrixUnit best, Encoding queries, Encoding out) {
    if (allowed == Bfloat16Products::never) return;
    const auto terms = [&](Encoding encoding) -> std::size_t {
      return allowed == Bfloat16Products::always || encoding == Encoding::bfloat16 ? 1 : 2;
    };
    query_terms = terms(queries);
    turned_terms = terms(Encoding::float32);
    weight_terms = terms(out);
    // Vectors make two products in the time of one in float.
    if (best == MatrixUnit::tiles || query_terms + weight_terms == 2) unit = best;
  }
  [[nodiscard]] constexpr bool is_narrow() const { return unit != MatrixUnit::float_vectors; }
  [[nodiscard]] constexpr bool pays(std::size_t terms) const {
    return unit == MatrixUnit::tiles || (is_narrow() && terms == 1);
  }
};

}  // namespace kvpolicy::cpu
