// SPDX-License-Identifier: Apache-2.0
#define DOCTEST_CONFIG_IMPLEMENT_WITH_MAIN
#include <doctest/doctest.h>

// Asked by LeakSanitizer, and by nobody in other builds: clang's OpenMP library forgets some memory of its own when the
// number of threads changes.
extern "C" const char* __lsan_default_suppressions();
extern "C" const char* __lsan_default_suppressions() { return "leak:libomp\n"; }
