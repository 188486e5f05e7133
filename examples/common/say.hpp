// SPDX-License-Identifier: Apache-2.0
//
// A line for whoever runs a program that has to go on, also where nobody reads what it says.
#pragma once

#include <cstdio>
#include <string>

namespace kvpolicy::tools {

/// Writes a line to stderr. Unlike fmt::print it does not throw where that is closed.
inline void say(const std::string& line) { std::fputs((line + '\n').c_str(), stderr); }

}  // namespace kvpolicy::tools
