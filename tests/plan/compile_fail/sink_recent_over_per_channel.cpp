// SPDX-License-Identifier: Apache-2.0
//
// Per-channel groups quantise rows together, so this policy, which drops single rows, cannot use them.
// expect: SinkRecentCache: a window drops rows one by one
#include <kvpolicy/plan/shipped_policies.hpp>

template class kvpolicy::SinkRecentCache<kvpolicy::PerChannelStorage<float>>;
