// SPDX-License-Identifier: Apache-2.0
//
// Shows progress of long work on stderr, so that stdout has only results. On a terminal it is one
// line that is overwritten; in a file or a pipe it is a line every ten seconds.
#pragma once

#include <chrono>
#include <string>

namespace kvpolicy::tools {

class Progress {
 public:
  explicit Progress(bool shown = true);
  Progress(const Progress&) = delete;
  Progress& operator=(const Progress&) = delete;
  ~Progress() { clear(); }

  /// `share` of the whole work is done, from 0 to 1, and `doing` is under way. The time left is
  /// estimated from the share as soon as that makes sense.
  void update(double share, const std::string& doing);

  /// Prints a line that stays above the progress.
  void note(const std::string& line);

  /// Removes the progress line from the terminal.
  void clear();

 private:
  using Clock = std::chrono::steady_clock;

  bool shown_;
  bool terminal_;
  bool drawn_ = false;
  Clock::time_point began_ = Clock::now();
  Clock::time_point latest_ = began_;
};

}  // namespace kvpolicy::tools
