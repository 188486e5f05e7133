// SPDX-License-Identifier: Apache-2.0
//
// Prefixes that outlive the server: a folder with a file for each plan. A plan's file is read when the plan is first
// asked for, and files are written at the end and now and then, so that a crash loses little. Servers may share a
// folder: each takes in what the others have saved, and saves it with its own.
#pragma once

#include <chrono>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <mutex>
#include <string>
#include <thread>
#include <utility>

#include "serve/scheduler.hpp"

namespace kvpolicy::serve {

class PrefixFolder {
 public:
  /// `tag`: what must be the same for saved prefixes to make sense. `tell` is given a line about each file that was
  /// read or refused, each saving between, and each failure to write, by any thread.
  PrefixFolder(std::filesystem::path folder, std::string tag, std::function<void(const std::string&)> tell);
  ~PrefixFolder();
  PrefixFolder(const PrefixFolder&) = delete;
  PrefixFolder& operator=(const PrefixFolder&) = delete;

  /// Keeps what the folder has of this plan; once, later calls do nothing. What cannot be read is told, and goes when
  /// the plan's prefixes are next written. Returns whether any came back.
  bool bring_back(Prefixes& prefixes, const Plan& plan);
  /// Keeps what other servers have saved since, of the plans that were brought back; looks once a second. Returns
  /// whether there was anything new.
  bool take_in(Prefixes& prefixes);

  /// Takes in what others have saved, writes all prefixes, and returns their number. Files of plans that nobody has
  /// asked for stay. Nobody else may use the prefixes.
  /// @throws as kvpolicy::save
  std::size_t save(Prefixes& prefixes);
  /// Writes all prefixes in place of what others have saved, for ranks of a server: they must all have the same ones.
  /// @throws as kvpolicy::save
  std::size_t save_own(const Prefixes& prefixes);
  /// Writes all prefixes at these intervals if there is anything new, in a thread of its own, until the end. Prefixes
  /// are found meanwhile; whoever keeps one waits for the file. What others have saved has to be taken in before.
  void save_every(std::chrono::seconds interval, const Prefixes& prefixes);
  /// Ends that thread.
  void stop();

 private:
  // Tells one version of a file from another; none: there is no file.
  struct Stamp {
    std::filesystem::file_time_type time = {};
    std::uintmax_t bytes = 0;
    friend bool operator==(const Stamp&, const Stamp&) = default;
  };
  struct Known {
    Plan plan;
    Stamp read;  // the version that was read last, or written
  };
  class Lock;

  [[nodiscard]] static Stamp stamp_of(const std::filesystem::path& path);
  bool read_changed(Prefixes& prefixes);
  [[nodiscard]] bool is_changed();
  std::size_t write(const Prefixes& prefixes);

  std::filesystem::path folder_;
  std::string tag_;
  std::function<void(const std::string&)> tell_;
  std::chrono::steady_clock::time_point looked_;

  std::mutex mutex_;  // guards what follows
  std::map<std::filesystem::path, Known> known_;
  std::condition_variable stopping_;
  bool stopped_ = false;
  std::thread thread_;
};

}  // namespace kvpolicy::serve
