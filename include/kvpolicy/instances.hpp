// SPDX-License-Identifier: Apache-2.0
//
// Plans, caches and policies that a program compiles once, instead of in each file that names them. Give all files the
// definition KVPOLICY_SEPARATE_COMPILATION: the headers then declare what ships, and a source file defines it:
//
//     #include <kvpolicy/instances.hpp>
//     KVPOLICY_DEFINE_INSTANCES(float)  // float16 and bfloat16: a line more here, or in a file of its own
//
// A file means the same either way. Policies, storages and engines of your own are compiled where they are named; scorers
// other than SnapKV's are declared where plan/shipped_policies.hpp is included. What is declared and not defined the
// linker names. cpu/instances.hpp is for the CPU engine; the library kvpolicy::compiled has all that is defined here.
#pragma once

#include <kvpolicy/cache/kv_cache.hpp>
#include <kvpolicy/plan/shipped_policies.hpp>

/// One policy of the list.
#define KVPOLICY_DEFINE_POLICY(E, ...) KVPOLICY_POLICY_INSTANCE(template, __VA_ARGS__)

/// Defines the plans, the caches over the plain engine and the shipped policies, of rows of element type E.
#define KVPOLICY_DEFINE_INSTANCES(E)                       \
  namespace kvpolicy {                                     \
  KVPOLICY_FOR_SHIPPED_POLICIES(KVPOLICY_DEFINE_POLICY, E) \
  KVPOLICY_REGISTRY_INSTANCE(template, E)                  \
  KVPOLICY_PLAN_INSTANCE(template, E)                      \
  KVPOLICY_PLAIN_CACHE_INSTANCE(template, E)               \
  }
