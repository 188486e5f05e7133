// SPDX-License-Identifier: Apache-2.0
//
// Per-channel groups quantise rows together, so this policy, which keeps single rows, cannot use them.
// expect: HeadBudgetCache: eviction keeps single rows
#include <kvpolicy/plan/shipped_policies.hpp>

template class kvpolicy::HeadBudgetCache<kvpolicy::PerChannelStorage<float>>;
