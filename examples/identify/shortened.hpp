// SPDX-License-Identifier: Apache-2.0
#pragma once

#include <cmath>

namespace kvpolicy::tools {

/// Scores are written with seven digits; further digits are rounding errors of the attention itself.
inline double shortened(double score) { return std::round(score * 1e7) / 1e7; }

}  // namespace kvpolicy::tools
