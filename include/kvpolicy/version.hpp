// SPDX-License-Identifier: Apache-2.0
//
// The version of the library. It stands here only: CMake, pkg-config and the packages read it
// from these three lines.
#pragma once

/// Before 1.0, stays 0.
#define KVPOLICY_VERSION_MAJOR 0
/// Rises with every release that adds something or, before 1.0, breaks something.
#define KVPOLICY_VERSION_MINOR 1
/// Rises with releases that only mend.
#define KVPOLICY_VERSION_PATCH 0

namespace kvpolicy {

/// KVPOLICY_VERSION_MAJOR.
inline constexpr int version_major = KVPOLICY_VERSION_MAJOR;
/// KVPOLICY_VERSION_MINOR.
inline constexpr int version_minor = KVPOLICY_VERSION_MINOR;
/// KVPOLICY_VERSION_PATCH.
inline constexpr int version_patch = KVPOLICY_VERSION_PATCH;

}  // namespace kvpolicy
