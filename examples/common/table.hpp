// SPDX-License-Identifier: Apache-2.0
//
// A table of text cells: aligned for a terminal, or as Markdown.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace kvpolicy::tools {

enum class Align : std::uint8_t { left, right };

class Table {
 public:
  /// `unit` is printed under the title and may be empty.
  void add_column(std::string title, std::string unit = "", Align align = Align::right);

  /// At most as many cells as there are columns; missing ones stay empty.
  void add_row(std::vector<std::string> cells);

  /// Titles, a rule, rows; every line ends in a newline. `bold` prints the titles bold with escape
  /// codes.
  [[nodiscard]] std::string text(bool bold = false) const;
  [[nodiscard]] std::string markdown() const;

 private:
  struct Column {
    std::string title;
    std::string unit;
    Align align;
  };
  [[nodiscard]] std::vector<std::size_t> widths() const;

  std::vector<Column> columns_;
  std::vector<std::vector<std::string>> rows_;
};

}  // namespace kvpolicy::tools
