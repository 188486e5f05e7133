// SPDX-License-Identifier: Apache-2.0
//
// A policy is instantiated where its settings become HeadSettings: in one function, which is all that other files need of
// it. At the ends of their headers, shipped policies declare that function where a program compiles them once.
#pragma once

#include <memory>
#include <type_traits>

#include <kvpolicy/core/separate.hpp>
#include <kvpolicy/policy/policy.hpp>
#ifdef KVPOLICY_SEPARATE_COMPILATION
#include <kvpolicy/storage/dense_storage.hpp>
#include <kvpolicy/storage/residual_storage.hpp>
#endif

namespace kvpolicy::detail {

class AnySettings;

// All settings are shared by one type of pointer, so that no policy instantiates its own.
template <KvPolicy P>
[[nodiscard]] std::shared_ptr<const AnySettings> share_settings(const typename P::Config& config);

}  // namespace kvpolicy::detail

/// The instance of one policy; SPEC is `template` or `extern template`. Stands in namespace kvpolicy.
#define KVPOLICY_POLICY_INSTANCE(SPEC, ...)                                            \
  SPEC std::shared_ptr<const detail::AnySettings> detail::share_settings<__VA_ARGS__>( \
      const typename __VA_ARGS__::Config&);

/// Declares POLICY<STORAGE<E>, ...> for each element type E, where a program compiles policies once.
#ifdef KVPOLICY_SEPARATE_COMPILATION
#define KVPOLICY_DECLARE_POLICY(POLICY, STORAGE, ...)                                            \
  KVPOLICY_POLICY_INSTANCE(extern template, POLICY<STORAGE<float> __VA_OPT__(, ) __VA_ARGS__>)   \
  KVPOLICY_POLICY_INSTANCE(extern template, POLICY<STORAGE<float16> __VA_OPT__(, ) __VA_ARGS__>) \
  KVPOLICY_POLICY_INSTANCE(extern template, POLICY<STORAGE<bfloat16> __VA_OPT__(, ) __VA_ARGS__>)
#else
#define KVPOLICY_DECLARE_POLICY(...)
#endif
