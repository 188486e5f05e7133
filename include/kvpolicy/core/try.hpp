// SPDX-License-Identifier: Apache-2.0
//
// try, catch and a throw of what was caught, for our own headers, which compile without exceptions,
// too: undoing half of a call is code that never runs where nothing is thrown. What becomes of an
// error then is KVPOLICY_THROW's to say (core/error.hpp).
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

// The includer's own, which may return.
#ifdef KVPOLICY_THROW
#define KVPOLICY_THROW_REPLACED
#endif

namespace kvpolicy::detail {

/// Gives code that is compiled without exceptions, but never runs, something to have caught.
template <class E>
[[noreturn]] const E& nothing_caught() noexcept {
  std::abort();
}

}  // namespace kvpolicy::detail
