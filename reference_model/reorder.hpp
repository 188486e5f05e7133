// SPDX-License-Identifier: Apache-2.0
//
// Applies plan/reorder.hpp to a whole model: in every layer, KV heads and the query heads that read
// them are permuted. The model then computes the same logits, up to rounding, with a plan that was
// permuted in the same way.
#pragma once

#include <vector>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/reorder.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

/// The model with permuted heads, by one order of KV heads for each layer.
/// @throws ConfigError if the orders do not fit the model
[[nodiscard]] Llama reordered(const Llama& model, const std::vector<HeadOrder>& orders);

}  // namespace kvpolicy::reference
