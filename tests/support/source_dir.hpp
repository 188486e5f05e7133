// SPDX-License-Identifier: Apache-2.0
//
// Where the project lies, for tests that read its files. A function in one file, so that no other test must be
// compiled again where the project lies elsewhere.
#pragma once

#include <string>

namespace kvpolicy::testing {

/// The top folder of the project.
std::string source_dir();

}  // namespace kvpolicy::testing
