// SPDX-License-Identifier: Apache-2.0
//
// Per-channel groups tie rows together, so this policy cannot have them.
// expect: HeadBudgetCache: eviction keeps single rows
#include <kvpolicy/plan/shipped_policies.hpp>

template class kvpolicy::HeadBudgetCache<kvpolicy::PerChannelStorage<float>>;
