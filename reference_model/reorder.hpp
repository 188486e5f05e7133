// SPDX-License-Identifier: Apache-2.0
//
// plan/reorder.hpp on a whole model: in every layer, KV heads and the query heads that read them
// move to new places. The model then computes the same logits, to rounding, over a plan that was
// moved with it.
#pragma once

#include <vector>

#include <kvpolicy/core/model_shape.hpp>
#include <kvpolicy/plan/reorder.hpp>
#include <reference_model/llama.hpp>

namespace kvpolicy::reference {

/// The model with its heads in new places, by one order of KV heads for each layer.
/// @throws ConfigError if the orders do not fit the model.
[[nodiscard]] Llama reordered(const Llama& model, const std::vector<HeadOrder>& orders);

}  // namespace kvpolicy::reference
