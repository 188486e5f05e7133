// SPDX-License-Identifier: Apache-2.0
//
// Draws a DuoAttention pattern: a line for each layer, a cell for each KV head, shaded by its gate (or,
// where all gates are low, by its share of the highest one) and framed where the head keeps every row.
#pragma once

#include <string>

#include <kvpolicy/plan/duo_gates.hpp>

namespace kvpolicy::tools {

[[nodiscard]] std::string heat_map(const HeadGates& gates, const HeadKinds& kinds, bool colour);

}  // namespace kvpolicy::tools
