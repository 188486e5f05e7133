// SPDX-License-Identifier: Apache-2.0
#include "serve/prefix_folder.hpp"

#include <fcntl.h>
#include <sys/file.h>
#include <unistd.h>

#include <algorithm>
#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include <kvpolicy/cache/saved_prefixes.hpp>
#include <kvpolicy/core/error.hpp>

namespace kvpolicy::serve {

namespace fs = std::filesystem;

// Other servers wait until this one has written. A folder that cannot be made cannot be written to either.
class PrefixFolder::Lock {
 public:
  explicit Lock(const fs::path& folder) {
    std::error_code ignored;
    fs::create_directories(folder, ignored);
    file_ = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file_ >= 0) ::flock(file_, LOCK_EX);
  }
  ~Lock() {
    if (file_ >= 0) ::close(file_);
  }
  Lock(const Lock&) = delete;
  Lock& operator=(const Lock&) = delete;

 private:
  int file_ = -1;
};

PrefixFolder::PrefixFolder(fs::path folder, std::string tag, std::function<void(const std::string&)> tell)
    : folder_{std::move(folder)}, tag_{std::move(tag)}, tell_{std::move(tell)} {}

PrefixFolder::~PrefixFolder() { stop(); }

PrefixFolder::Stamp PrefixFolder::stamp_of(const fs::path& path) {
  std::error_code error;
  Stamp stamp;
  stamp.time = fs::last_write_time(path, error);
  if (error) return {};
  stamp.bytes = fs::file_size(path, error);
  return error ? Stamp{} : stamp;
}

bool PrefixFolder::bring_back(Prefixes& prefixes, const Plan& plan) {
  const fs::path path = saved_prefixes_path(plan, folder_);
  const Stamp stamp = stamp_of(path);
  {
    const std::lock_guard lock{mutex_};
    if (!known_.emplace(path, Known{plan, stamp}).second) return false;
  }
  if (stamp == Stamp{}) return false;
  std::size_t count = 0;
  const auto read = [&] {
    count = load(prefixes, plan, folder_, tag_);
    tell_(message(count, " loaded from ", path.string()));
  };
  try {
    try {
      read();
    } catch (const std::bad_alloc&) {
      // Others are in the way. A file takes about as much as its prefixes do.
      if (prefixes.evict(static_cast<std::size_t>(stamp.bytes)) == 0) throw;
      read();
    }
  } catch (const std::bad_alloc&) {
    tell_(message("not loaded: ", path.string(), " takes more memory than there is"));
  } catch (const Error& error) {
    tell_(message("not loaded: ", error.what()));
  }
  return count > 0;
}

// Reads the files that others have written.
bool PrefixFolder::read_changed(Prefixes& prefixes) {
  bool any = false;
  const std::lock_guard lock{mutex_};
  for (auto& [path, known] : known_) {
    const Stamp stamp = stamp_of(path);
    if (stamp == known.read) continue;
    known.read = stamp;
    try {
      const std::size_t count = load(prefixes, known.plan, folder_, tag_);
      if (count > 0) tell_(message(count, " taken in from ", path.string()));
      any = any || count > 0;
    } catch (const std::bad_alloc&) {
      // They would only save work.
    } catch (const Error& error) {
      tell_(message("not taken in: ", error.what()));
    }
  }
  return any;
}

bool PrefixFolder::take_in(Prefixes& prefixes) {
  const auto now = std::chrono::steady_clock::now();
  if (now - looked_ < std::chrono::seconds{1}) return false;
  looked_ = now;
  return read_changed(prefixes);
}

bool PrefixFolder::is_changed() {
  const std::lock_guard lock{mutex_};
  return std::ranges::any_of(known_, [](const auto& one) { return stamp_of(one.first) != one.second.read; });
}

std::size_t PrefixFolder::save_own(const Prefixes& prefixes) {
  const Lock others{folder_};
  return write(prefixes);
}

std::size_t PrefixFolder::write(const Prefixes& prefixes) {
  // What is written now is known, also where another file cannot be.
  const auto note = [this] {
    const std::lock_guard lock{mutex_};
    for (auto& [path, known] : known_) known.read = stamp_of(path);
  };
  try {
    const std::size_t count = kvpolicy::save(prefixes, folder_, tag_);
    note();
    return count;
  } catch (...) {
    note();
    throw;
  }
}

std::size_t PrefixFolder::save(Prefixes& prefixes) {
  const Lock others{folder_};
  static_cast<void>(read_changed(prefixes));
  return write(prefixes);
}

void PrefixFolder::save_every(std::chrono::seconds interval, const Prefixes& prefixes) {
  thread_ = std::thread{[this, interval, &prefixes] {
    std::size_t saved = prefixes.statistics().kept;
    std::unique_lock lock{mutex_};
    while (!stopping_.wait_for(lock, interval, [this] { return stopped_; })) {
      lock.unlock();
      const std::size_t kept = prefixes.statistics().kept;
      if (kept != saved) {
        try {
          const Lock others{folder_};
          if (!is_changed()) {
            const std::size_t count = write(prefixes);
            saved = kept;
            tell_(message(count, " saved to ", folder_.string()));
          }
        } catch (const std::exception& error) {
          tell_(message("not saved: ", error.what()));
        }
      }
      lock.lock();
    }
  }};
}

void PrefixFolder::stop() {
  {
    const std::lock_guard lock{mutex_};
    stopped_ = true;
  }
  stopping_.notify_all();
  if (thread_.joinable()) thread_.join();
}

}  // namespace kvpolicy::serve
