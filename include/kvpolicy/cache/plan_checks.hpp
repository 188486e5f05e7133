// SPDX-License-Identifier: Apache-2.0
//
// What a cache refuses of a plan when it is made. The host cache and the device cache refuse the same heads
// in the same words. `cache` is the name with which a message begins.
#pragma once

#include <cstddef>
#include <string_view>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/plan/head_plan.hpp>

namespace kvpolicy {

/// Refuses a head that changes in ways that cannot be taken back, in a cache whose rows can.
/// @throws ConfigError if `max_rollback` is not 0 and the head compresses by itself or adds up attention
inline void check_rollback(std::string_view cache, std::size_t layer, std::size_t head,
                           bool compresses_by_itself, bool accumulates, std::size_t max_rollback) {
  require(max_rollback == 0 || !compresses_by_itself, cache, ": KV head ", head, " of layer ", layer,
          " compresses by itself, which cannot be rolled back; max_rollback is ", max_rollback,
          ", must be 0");
  require(max_rollback == 0 || !accumulates, cache, ": KV head ", head, " of layer ", layer,
          " adds up attention, which cannot be rolled back; max_rollback is ", max_rollback, ", must be 0");
}

/// Refuses heads that share their budgets, in a layer or over the model, but are not ranked alike. Layers are asked in
/// order.
/// @throws ConfigError
template <class... T>
void check_sharing(std::string_view cache, const HeadPlan<T...>& plan, std::size_t layer) {
  const HeadSettings<typename HeadPlan<T...>::element_type>* first = nullptr;
  const HeadSettings<typename HeadPlan<T...>::element_type>* in_model = nullptr;
  // Heads that share over the model have to agree with those of the layers before, too.
  for (std::size_t l = 0; l <= layer; ++l) {
    for (std::size_t head = 0; head < plan.shape().layer(l).kv_heads; ++head) {
      const auto& own = plan.at(l, head);
      if (!own.is_adaptive_in_layer() || (l < layer && !own.is_adaptive_in_model())) continue;
      auto& other = own.is_adaptive_in_model() ? in_model : first;
      if (other == nullptr) other = &own;
      require(own.may_share(*other), cache, ": KV head ", head, " of layer ", layer, " shares the ",
              own.is_adaptive_in_model() ? "model" : "layer",
              "'s budget with heads that have another policy or other settings; ",
              "they must agree in all but the budget");
    }
  }
}

}  // namespace kvpolicy
