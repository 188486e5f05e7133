// SPDX-License-Identifier: Apache-2.0
#include "progress.hpp"

#include <algorithm>
#include <cstddef>
#include <cstdio>

#include <fmt/format.h>

#include "terminal.hpp"

namespace kvpolicy::tools {
namespace {

constexpr std::size_t bar_cells = 20;

std::string bar(double share) {
  const auto full = static_cast<std::size_t>(share * static_cast<double>(bar_cells) + 0.5);
  std::string cells;
  for (std::size_t i = 0; i < bar_cells; ++i) cells += i < full ? "█" : "░";
  return cells;
}

}  // namespace

Progress::Progress(bool shown) : shown_{shown}, terminal_{is_terminal(stderr)} {}

void Progress::update(double share, const std::string& doing) {
  if (!shown_) return;
  const Clock::time_point now = Clock::now();
  const std::chrono::duration<double> since = now - latest_;
  if (since.count() < (terminal_ ? 0.1 : 10.0)) return;
  latest_ = now;
  share = std::clamp(share, 0.0, 1.0);
  const double spent = std::chrono::duration<double>(now - began_).count();
  std::string left;
  if (share > 0.02 && spent > 1) left = duration(spent / share * (1 - share)) + " left";
  if (terminal_) {
    fmt::print(stderr, "\r\033[K  {} {:3.0f} %  {}{}{}", bar(share), 100 * share, doing,
               left.empty() ? "" : ", ", left);
    drawn_ = true;
  } else {
    fmt::print(stderr, "  {:3.0f} %  {}{}{}\n", 100 * share, doing, left.empty() ? "" : ", ", left);
  }
  std::fflush(stderr);
}

void Progress::note(const std::string& line) {
  if (!shown_) return;
  clear();
  fmt::print(stderr, "{}\n", line);
}

void Progress::clear() {
  if (!drawn_) return;
  fmt::print(stderr, "\r\033[K");
  std::fflush(stderr);
  drawn_ = false;
}

}  // namespace kvpolicy::tools
