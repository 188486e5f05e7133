// SPDX-License-Identifier: Apache-2.0
//
// fmt checks format strings at compile time, and so does our formatter.
// expect: format_is_wrong
#include <kvpolicy/format.hpp>

std::string no_such_unit();
std::string no_such_unit() { return fmt::format("{:KB}", kvpolicy::Bytes{1}); }
