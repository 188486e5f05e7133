// SPDX-License-Identifier: Apache-2.0
#include "table.hpp"

#include <algorithm>
#include <cstddef>
#include <utility>

#include "terminal.hpp"

namespace kvpolicy::tools {
namespace {

std::string padded(const std::string& cell, std::size_t width, Align align) {
  const std::string space(width - std::min(width, display_width(cell)), ' ');
  return align == Align::left ? cell + space : space + cell;
}

void end_line(std::string& text) {
  while (text.ends_with(' ')) text.pop_back();
  text += '\n';
}

}  // namespace

void Table::add_column(std::string title, std::string unit, Align align) {
  columns_.push_back({std::move(title), std::move(unit), align});
}

void Table::add_row(std::vector<std::string> cells) {
  cells.resize(columns_.size());
  rows_.push_back(std::move(cells));
}

std::vector<std::size_t> Table::widths() const {
  std::vector<std::size_t> widths;
  for (std::size_t c = 0; c < columns_.size(); ++c) {
    std::size_t width = std::max(display_width(columns_[c].title), display_width(columns_[c].unit));
    for (const auto& row : rows_) width = std::max(width, display_width(row[c]));
    widths.push_back(width);
  }
  return widths;
}

std::string Table::text(bool bold) const {
  const std::vector<std::size_t> wide = widths();
  std::string out;
  const auto line = [&](auto cell_of) {
    for (std::size_t c = 0; c < columns_.size(); ++c) {
      out += c == 0 ? "  " : "   ";
      out += padded(cell_of(c), wide[c], columns_[c].align);
    }
    end_line(out);
  };
  if (bold) out += "\033[1m";
  line([&](std::size_t c) { return columns_[c].title; });
  if (bold) out += "\033[0m";
  if (std::ranges::any_of(columns_, [](const Column& c) { return !c.unit.empty(); })) {
    line([&](std::size_t c) { return columns_[c].unit; });
  }
  line([&](std::size_t c) {
    std::string rule;
    for (std::size_t i = 0; i < wide[c]; ++i) rule += "─";
    return rule;
  });
  for (const auto& row : rows_) line([&](std::size_t c) { return row[c]; });
  return out;
}

std::string Table::markdown() const {
  std::string out = "|";
  for (const Column& c : columns_) {
    out += ' ' + c.title + (c.unit.empty() ? "" : ' ' + c.unit) + " |";
  }
  out += "\n|";
  for (const Column& c : columns_) out += c.align == Align::left ? "---|" : "---:|";
  for (const auto& row : rows_) {
    out += "\n|";
    for (const std::string& cell : row) out += ' ' + cell + " |";
  }
  return out + '\n';
}

}  // namespace kvpolicy::tools
