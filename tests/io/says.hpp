// SPDX-License-Identifier: Apache-2.0
//
// CHECK(message == Says{"part"}): an error says what it must, and the test shows what it said.
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
