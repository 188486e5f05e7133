// SPDX-License-Identifier: Apache-2.0
#include <kvpolicy/compiled/policies.hpp>

#define KVPOLICY_COMPILE_POLICY(E, ...) KVPOLICY_POLICY_INSTANCE(template, __VA_ARGS__)

namespace kvpolicy {

KVPOLICY_FOR_SHIPPED_POLICIES(KVPOLICY_COMPILE_POLICY, bfloat16)
template class KvCache<bfloat16>;

}  // namespace kvpolicy
