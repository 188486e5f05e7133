// SPDX-License-Identifier: Apache-2.0
//
// The version of the library. It stands here only: CMake, pkg-config and the packages read it
// from these three lines.
#pragma once

#define KVPOLICY_VERSION_MAJOR 0
#define KVPOLICY_VERSION_MINOR 1
#define KVPOLICY_VERSION_PATCH 0

namespace kvpolicy {

inline constexpr int version_major = KVPOLICY_VERSION_MAJOR;
inline constexpr int version_minor = KVPOLICY_VERSION_MINOR;
inline constexpr int version_patch = KVPOLICY_VERSION_PATCH;

}  // namespace kvpolicy
