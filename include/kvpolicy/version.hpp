// SPDX-License-Identifier: Apache-2.0
//
// The version of the library. It is defined only here: CMake, pkg-config and the packages read it from
// these three macros.
#pragma once

/// Stays 0 before 1.0.
#define KVPOLICY_VERSION_MAJOR 0
/// Grows with every release that adds something or, before 1.0, breaks something.
#define KVPOLICY_VERSION_MINOR 1
/// Grows with releases that only fix bugs.
#define KVPOLICY_VERSION_PATCH 0

namespace kvpolicy {

/// The value of KVPOLICY_VERSION_MAJOR.
inline constexpr int version_major = KVPOLICY_VERSION_MAJOR;
/// The value of KVPOLICY_VERSION_MINOR.
inline constexpr int version_minor = KVPOLICY_VERSION_MINOR;
/// The value of KVPOLICY_VERSION_PATCH.
inline constexpr int version_patch = KVPOLICY_VERSION_PATCH;

}  // namespace kvpolicy
