// SPDX-License-Identifier: Apache-2.0
//
// The ways back through RMSNorm and SwiGLU, with respect to what went in. Weights get no gradient
// anywhere in gradient/: what is learned there is which heads need what. `dx` is always how a loss
// changes with x.
#pragma once

#include <cstddef>
#include <vector>

namespace kvpolicy::reference {

/// dx += what dy, of normalise(x)'s result, makes of it. All [rows, weight.size()]; no overlap.
void normalise_back(const float* x, std::size_t rows, const std::vector<float>& weight, float eps,
                    const float* dy, float* dx);

/// Of y = silu(gate) * up: the gradients of gate and up, which may take the place of dy.
void swiglu_back(const float* gate, const float* up, std::size_t count, const float* dy,
                 float* dgate, float* dup);

}  // namespace kvpolicy::reference
