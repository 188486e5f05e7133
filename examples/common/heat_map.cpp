// SPDX-License-Identifier: Apache-2.0
#include "heat_map.hpp"

#include <algorithm>
#include <array>
#include <cstddef>
#include <string_view>

#include <fmt/format.h>

namespace kvpolicy::tools {
namespace {

constexpr std::array<std::string_view, 5> shades{"··", "░░", "▒▒", "▓▓", "██"};

// Gates that were not trained may all be far below 1; then the highest one is the darkest.
double darkest(const HeadGates& gates) {
  double highest = 0.1;
  for (std::size_t layer = 0; layer < gates.layers(); ++layer) {
    for (std::size_t head = 0; head < gates.heads(); ++head) {
      highest = std::max(highest, static_cast<double>(gates(layer, head)));
    }
  }
  return highest < 0.5 ? highest : 1;
}

std::string_view shade(double share) {
  const double index = std::clamp(share, 0.0, 1.0) * static_cast<double>(shades.size());
  return shades[std::min(static_cast<std::size_t>(index), shades.size() - 1)];
}

}  // namespace

std::string heat_map(const HeadGates& gates, const HeadKinds& kinds, bool colour) {
  const std::string_view kept_colour = colour ? "\033[32m" : "";
  const std::string_view other_colour = colour ? "\033[2m" : "";
  const double dark = darkest(gates);
  const std::string_view plain = colour ? "\033[0m" : "";
  std::string text = "  KV head ";
  for (std::size_t head = 0; head < gates.heads(); ++head) text += fmt::format("{:^5}", head);
  while (text.ends_with(' ')) text.pop_back();
  text += '\n';
  for (std::size_t layer = 0; layer < gates.layers(); ++layer) {
    text += fmt::format("  layer{:>3} ", layer);
    std::size_t kept = 0;
    for (std::size_t head = 0; head < gates.heads(); ++head) {
      const bool keeps = kinds(layer, head) == HeadKind::retrieval;
      kept += keeps;
      text += fmt::format("{}{}{}{}{} ", keeps ? kept_colour : other_colour, keeps ? "[" : " ",
                          shade(gates(layer, head) / dark), keeps ? "]" : " ", plain);
    }
    text += fmt::format("  {} of {}\n", kept, gates.heads());
  }
  return text;
}

}  // namespace kvpolicy::tools
