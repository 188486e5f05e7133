// SPDX-License-Identifier: Apache-2.0
//
// KVPOLICY_TEST_ASAN is 1 under AddressSanitizer, else 0.
#pragma once

#if defined(__SANITIZE_ADDRESS__)
#define KVPOLICY_TEST_ASAN 1
#elif defined(__has_feature)
#if __has_feature(address_sanitizer)
#define KVPOLICY_TEST_ASAN 1
#endif
#endif
#ifndef KVPOLICY_TEST_ASAN
#define KVPOLICY_TEST_ASAN 0
#endif
