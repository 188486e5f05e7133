// SPDX-License-Identifier: Apache-2.0
//
// CHECK(message == Says{"part"}) checks that a message contains a part; a failed check shows the whole
// message.
#pragma once

#include <ostream>
#include <string>
#include <string_view>

namespace kvpolicy::testing {

struct Says {
  std::string_view part;
  friend bool operator==(const std::string& text, const Says& says) {
    return text.find(says.part) != std::string::npos;
  }
  friend std::ostream& operator<<(std::ostream& out, const Says& says) {
    return out << "a text with \"" << says.part << '"';
  }
};

}  // namespace kvpolicy::testing
