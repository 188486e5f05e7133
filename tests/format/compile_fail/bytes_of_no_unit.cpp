// SPDX-License-Identifier: Apache-2.0
//
// fmt reads format strings while the program is compiled, and so does our part of them.
// expect: format_is_wrong
#include <kvpolicy/format.hpp>

std::string no_such_unit();
std::string no_such_unit() { return fmt::format("{:KB}", kvpolicy::Bytes{1}); }
