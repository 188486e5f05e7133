// SPDX-License-Identifier: Apache-2.0
//
// Per-channel groups tie rows together, so this policy cannot have them.
// expect: SinkRecentCache: a window drops rows one by one
#include <kvpolicy/plan/shipped_policies.hpp>

template class kvpolicy::SinkRecentCache<kvpolicy::PerChannelStorage<float>>;
