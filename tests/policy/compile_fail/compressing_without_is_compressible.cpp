// SPDX-License-Identifier: Apache-2.0
//
// A policy that drops rows by rank, but does not say whether more rows would make it drop some.
// expect: kvpolicy: a policy that compresses (it has observed_queries) needs bool is_compressible(std::size_t more) const
#include <cstddef>

#include <kvpolicy/policy/head_budget_cache.hpp>
#include <kvpolicy/policy/head_settings.hpp>

using Budget = kvpolicy::HeadBudgetCache<kvpolicy::DenseStorage<float>>;

struct Own : Budget {
  using Budget::Budget;
  bool is_compressible(std::size_t) const = delete;
};

const auto settings = kvpolicy::HeadSettings<float>::of<Own>();
