// SPDX-License-Identifier: Apache-2.0
//
// Which sanitizer the tests run under; g++ and clang report it in different ways.
#pragma once

#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVPOLICY_TEST_ASAN
#endif
#if __has_feature(thread_sanitizer)
#define KVPOLICY_TEST_TSAN
#endif
#endif
#if defined(__SANITIZE_ADDRESS__) && !defined(KVPOLICY_TEST_ASAN)
#define KVPOLICY_TEST_ASAN
#endif
#if defined(__SANITIZE_THREAD__) && !defined(KVPOLICY_TEST_TSAN)
#define KVPOLICY_TEST_TSAN
#endif
