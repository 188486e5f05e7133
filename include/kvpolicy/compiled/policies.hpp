// SPDX-License-Identifier: Apache-2.0
//
// The shipped policies and the cache with the plain engine: declared here and compiled once, in the library
// (target kvpolicy::compiled). A file that includes this header and names these policies in plans compiles
// in about half the time; its meaning is the same. Policies and engines of your own are compiled where they
// are named.
#pragma once

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

/// SPEC is `template` or `extern template`.
#define KVPOLICY_POLICY_INSTANCE(SPEC, ...) \
  SPEC class PolicyHead<__VA_ARGS__>;       \
  SPEC class detail::PolicySettings<__VA_ARGS__>;

/// The same of a cache over an engine, and of its calls.
#define KVPOLICY_CACHE_INSTANCE(SPEC, E, ...)    \
  SPEC class detail::LayerCalls<E, __VA_ARGS__>; \
  SPEC class KvCache<E, __VA_ARGS__>;

/// The same of all that there is for rows of one element type: DO(E, policy) instantiates a policy.
#define KVPOLICY_ELEMENT_INSTANCES(SPEC, DO, E) \
  KVPOLICY_FOR_SHIPPED_POLICIES(DO, E)          \
  SPEC PolicyRegistry<E> shipped_policies<E>(); \
  SPEC class HeadPlan<E>;                       \
  KVPOLICY_CACHE_INSTANCE(SPEC, E, ScalarEngine)

/// Declares one policy, and is undefined again below.
#define KVPOLICY_DECLARE_POLICY(E, ...) KVPOLICY_POLICY_INSTANCE(extern template, __VA_ARGS__)

namespace kvpolicy {

KVPOLICY_ELEMENT_INSTANCES(extern template, KVPOLICY_DECLARE_POLICY, float)
KVPOLICY_ELEMENT_INSTANCES(extern template, KVPOLICY_DECLARE_POLICY, half)
KVPOLICY_ELEMENT_INSTANCES(extern template, KVPOLICY_DECLARE_POLICY, bfloat16)

}  // namespace kvpolicy

#undef KVPOLICY_DECLARE_POLICY
