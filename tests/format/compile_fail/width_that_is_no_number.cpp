// SPDX-License-Identifier: Apache-2.0
//
// Plans accept the format of text and nothing else.
// expect: ModelShape
#include <kvpolicy/format.hpp>

std::string no_such_format();
std::string no_such_format() { return fmt::format("{:MB}", kvpolicy::ModelShape{}); }
