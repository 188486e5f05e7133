// SPDX-License-Identifier: Apache-2.0
#include "support/source_dir.hpp"

std::string kvpolicy::testing::source_dir() { return KVPOLICY_SOURCE_DIR; }
