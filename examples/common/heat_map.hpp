// SPDX-License-Identifier: Apache-2.0
//
// A picture of a DuoAttention pattern: a row for each layer, a cell for each KV head, shaded by
// its gate, framed where the head keeps the whole text.
#pragma once

#include <string>

#include <kvpolicy/plan/duo_gates.hpp>

namespace kvpolicy::tools {

[[nodiscard]] std::string heat_map(const HeadGates& gates, const HeadKinds& kinds, bool colour);

}  // namespace kvpolicy::tools
