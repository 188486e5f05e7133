// SPDX-License-Identifier: Apache-2.0
#include "serve/prefix_folder.hpp"

#include <exception>
#include <new>
#include <system_error>
#include <utility>

#include <kvpolicy/cache/saved_prefixes.hpp>
#include <kvpolicy/core/error.hpp>

namespace kvpolicy::serve {

namespace fs = std::filesystem;

PrefixFolder::PrefixFolder(fs::path folder, std::string tag, std::function<void(const std::string&)> tell)
    : folder_{std::move(folder)}, tag_{std::move(tag)}, tell_{std::move(tell)} {
  std::error_code error;
  for (const fs::directory_entry& one : fs::directory_iterator{folder_, error}) {
    if (one.path().extension() == ".prefixes") unread_.insert(one.path().filename());
  }
}

PrefixFolder::~PrefixFolder() { stop(); }

bool PrefixFolder::bring_back(Prefixes& prefixes, const Plan& plan) {
  if (unread_.empty()) return false;
  const fs::path path = saved_prefixes_path(plan, folder_);
  if (unread_.erase(path.filename()) == 0) return false;
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
      std::error_code error;
      const std::uintmax_t bytes = fs::file_size(path, error);
      if (error || prefixes.evict(static_cast<std::size_t>(bytes)) == 0) throw;
      read();
    }
  } catch (const std::bad_alloc&) {
    tell_(message("not loaded: ", path.string(), " takes more memory than there is"));
  } catch (const Error& error) {
    tell_(message("not loaded: ", error.what()));
  }
  return count > 0;
}

std::size_t PrefixFolder::save(const Prefixes& prefixes) { return kvpolicy::save(prefixes, folder_, tag_); }

void PrefixFolder::save_every(std::chrono::seconds interval, const Prefixes& prefixes) {
  thread_ = std::thread{[this, interval, &prefixes] {
    std::size_t saved = prefixes.statistics().kept;
    std::unique_lock lock{mutex_};
    while (!stopping_.wait_for(lock, interval, [this] { return stopped_; })) {
      const std::size_t kept = prefixes.statistics().kept;
      if (kept == saved) continue;
      try {
        static_cast<void>(save(prefixes));
        saved = kept;
      } catch (const std::exception& error) {
        tell_(message("not saved: ", error.what()));
      }
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
