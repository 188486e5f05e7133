// SPDX-License-Identifier: Apache-2.0
#include <kvpolicy/compiled/policies.hpp>

#define KVPOLICY_COMPILE_POLICY(E, ...) KVPOLICY_POLICY_INSTANCE(template, __VA_ARGS__)

namespace kvpolicy {

KVPOLICY_ELEMENT_INSTANCES(template, KVPOLICY_COMPILE_POLICY, half)

}  // namespace kvpolicy
