// SPDX-License-Identifier: Apache-2.0
//
// Prefixes that outlive the server: a folder with a file for each plan. A plan's file is read when the plan is first
// asked for, and files are written at the end and now and then, so that a crash loses little.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <filesystem>
#include <functional>
#include <mutex>
#include <set>
#include <string>
#include <thread>

#include "serve/scheduler.hpp"

namespace kvpolicy::serve {

class PrefixFolder {
 public:
  /// `tag`: what must be the same for saved prefixes to make sense. `tell` is given a line about each file that was
  /// read or refused, and about each failure to write, by any thread.
  PrefixFolder(std::filesystem::path folder, std::string tag, std::function<void(const std::string&)> tell);
  ~PrefixFolder();
  PrefixFolder(const PrefixFolder&) = delete;
  PrefixFolder& operator=(const PrefixFolder&) = delete;

  /// Keeps what the folder had of this plan at the beginning; once, later calls do nothing. What cannot be read is told,
  /// and goes when the plan's prefixes are next written. Returns whether any came back.
  bool bring_back(Prefixes& prefixes, const Plan& plan);

  /// Writes all prefixes, and returns their number. Files of plans that nobody has asked for stay.
  /// @throws as kvpolicy::save
  std::size_t save(const Prefixes& prefixes);
  /// Does so at these intervals if there is anything new, in a thread of its own, until the end. Prefixes are found
  /// meanwhile; whoever keeps one waits for the file.
  void save_every(std::chrono::seconds interval, const Prefixes& prefixes);
  /// Ends that thread.
  void stop();

 private:
  std::filesystem::path folder_;
  std::string tag_;
  std::function<void(const std::string&)> tell_;
  std::set<std::filesystem::path> unread_;

  std::mutex mutex_;
  std::condition_variable stopping_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace kvpolicy::serve
