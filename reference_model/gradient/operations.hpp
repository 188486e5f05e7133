// SPDX-License-Identifier: Apache-2.0
//
// The backward passes of RMSNorm and SwiGLU with respect to their inputs. Weights get no gradient
// anywhere in gradient/, because only gates of heads are learned there. `dx` always is the
// derivative of a loss with respect to x.
#pragma once

#include <cstddef>
#include <vector>

namespace kvpolicy::reference {

/// Adds the gradient through normalise(x) to dx, from dy, the gradient of its result. All are
/// [rows, weight.size()] and must not overlap.
void normalise_back(const float* x, std::size_t rows, const std::vector<float>& weight, float eps,
                    const float* dy, float* dx);

/// Computes the gradients of gate and up from dy, that of y = silu(gate) * up; they may be written
/// over dy.
void swiglu_back(const float* gate, const float* up, std::size_t count, const float* dy, float* dgate,
                 float* dup);

}  // namespace kvpolicy::reference
