// SPDX-License-Identifier: Apache-2.0
//
// Macros for try, catch and rethrow in our own headers, which also compile without exceptions. Without
// exceptions nothing is thrown, so the code that undoes a half-done call never runs, and KVPOLICY_THROW
// decides what an error does (core/error.hpp).
#pragma once

#include <cstdlib>

#if defined(__cpp_exceptions) || defined(__EXCEPTIONS) || defined(_CPPUNWIND)
#define KVPOLICY_EXCEPTIONS 1
#define KVPOLICY_TRY try
#define KVPOLICY_CATCH(type) catch (type)
#define KVPOLICY_CATCH_AS(type, name) catch (const type& name)
#define KVPOLICY_CATCH_ALL catch (...)
#define KVPOLICY_RETHROW throw
#else
#define KVPOLICY_EXCEPTIONS 0
#define KVPOLICY_TRY if (true)
#define KVPOLICY_CATCH(type) else
#define KVPOLICY_CATCH_AS(type, name) \
  else if (const type& name = ::kvpolicy::detail::nothing_caught<type>(); false)
#define KVPOLICY_CATCH_ALL else
#define KVPOLICY_RETHROW ::std::abort()
#endif

// Set if the including program defined KVPOLICY_THROW itself; its definition may return.
#ifdef KVPOLICY_THROW
#define KVPOLICY_THROW_REPLACED
#endif

namespace kvpolicy::detail {

/// Takes the place of the caught exception in catch blocks, which compile without exceptions but never run.
template <class E>
[[noreturn]] const E& nothing_caught() noexcept {
  std::abort();
}

}  // namespace kvpolicy::detail
