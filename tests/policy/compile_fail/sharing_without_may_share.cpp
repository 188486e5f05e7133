// SPDX-License-Identifier: Apache-2.0
//
// A policy whose heads share a layer's budget, but which does not say with which settings they may.
// expect: static bool may_share(const Config&, const Config&)
#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/head_settings.hpp>

using Budget = kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<float>>;

struct Own : Budget {
  using Budget::Budget;
  static bool may_share(const Config&, const Config&) = delete;
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
