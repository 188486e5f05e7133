// SPDX-License-Identifier: Apache-2.0
//
// Tells one type from another, with and without RTTI (-fno-rtti). All sources of a program must agree on it, and the
// compiled library has it.
#pragma once

/// 1 if the program is compiled with RTTI, else 0.
#if defined(__cpp_rtti) || defined(__GXX_RTTI) || defined(_CPPRTTI)
#define KVPOLICY_RTTI 1
#include <typeindex>
#include <typeinfo>
#else
#define KVPOLICY_RTTI 0
#endif

namespace kvpolicy {

#if KVPOLICY_RTTI
/// Says which type something has, also where a shared library with hidden symbols has made it.
using TypeTag = std::type_index;
/// The tag of T.
template <class T>
[[nodiscard]] TypeTag type_tag_of() noexcept {
  return typeid(T);
}
#else
/// Says which type something has. What a shared library with hidden symbols has made is of another type.
using TypeTag = const void*;

namespace detail {
template <class T>
inline char has_an_address = 0;  // not const: a linker may fold equal constants
}

/// The tag of T.
template <class T>
[[nodiscard]] TypeTag type_tag_of() noexcept {
  return &detail::has_an_address<T>;
}
#endif

}  // namespace kvpolicy
