// SPDX-License-Identifier: Apache-2.0
//
// Progress of long work on stderr, so that stdout holds results alone. On a terminal it is one
// line that is drawn over; into a file or a pipe it is a line every ten seconds.
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

  /// How far the whole work is, from 0 to 1, and what is being done. The time left is estimated
  /// from the share once that says anything.
  void update(double share, const std::string& doing);

  /// A line that stays, above the progress.
  void note(const std::string& line);

  /// Takes the line off the terminal.
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
