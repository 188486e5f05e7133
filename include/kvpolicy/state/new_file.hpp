// SPDX-License-Identifier: Apache-2.0
//
// A file that takes the place of another one as a whole or not at all: it is written under another
// name in the same folder, waited for until the disk has it, and renamed.
#pragma once

#include <cstddef>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

/// 1 where files can be synced by POSIX calls, else 0.
#if __has_include(<fcntl.h>) && __has_include(<unistd.h>)
#define KVPOLICY_STATE_POSIX 1
#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#else
#define KVPOLICY_STATE_POSIX 0
#include <fstream>
#endif

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/state/blocks.hpp>

namespace kvpolicy {

/// Goes without a trace unless `replace` is reached. A process that dies on the way leaves a file
/// `<name>.partial-<number>` behind, and the old file as it was.
class NewFile : public ByteSink {
 public:
  /// @throws StorageError if the folder takes no new file, or `path` is something else than a file
  explicit NewFile(std::filesystem::path path) : path_{std::move(path)} {
    namespace fs = std::filesystem;
    std::error_code error;
    const fs::file_status status = fs::status(path_, error);
    require<StorageError>(!fs::exists(status) || fs::is_regular_file(status), path_.string(),
                          ": is not a regular file, cannot be replaced by one");
    open();
  }
  ~NewFile() override {
    close();
    std::error_code ignored;
    if (!partial_.empty()) std::filesystem::remove(partial_, ignored);
  }

  void write(std::span<const std::byte> bytes) override {
#if KVPOLICY_STATE_POSIX
    while (!bytes.empty()) {
      const ssize_t done = ::write(file_, bytes.data(), bytes.size());
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail(done < 0 ? errno : ENOSPC);
      bytes = bytes.subspan(static_cast<std::size_t>(done));
    }
#else
    file_.write(reinterpret_cast<const char*>(bytes.data()),
                static_cast<std::streamsize>(bytes.size()));
    if (!file_.good()) fail(0);
#endif
  }

  /// From now on the path means this file, also after a crash of the machine.
  /// @throws StorageError with the old file as it was
  void replace() {
#if KVPOLICY_STATE_POSIX
    if (::fsync(file_) != 0) fail(errno);
    const int closed = ::close(std::exchange(file_, -1));
    if (closed != 0) fail(errno);
#else
    file_.close();
    if (!file_.good()) fail(0);
#endif
    std::error_code error;
    std::filesystem::rename(partial_, path_, error);
    if (error) fail(error.value());
    partial_.clear();
    sync_folder();
  }

 private:
  [[noreturn]] void fail(int number) const {
    const std::string reason = number == 0 ? "" : ": " + std::generic_category().message(number);
    kvpolicy::fail<StorageError>(path_.string(), ": cannot be written", reason);
  }

  // A name that no other process takes.
  void open() {
    std::random_device random;
    for (int attempt = 0;; ++attempt) {
      partial_ = path_;
      partial_ += ".partial-" + std::to_string(random());
#if KVPOLICY_STATE_POSIX
      file_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
      if (file_ >= 0) return;
      if (errno == EEXIST && attempt < 100) continue;
      partial_.clear();
      fail(errno);
#else
      std::error_code error;
      if (std::filesystem::exists(partial_, error) && attempt < 100) continue;
      file_.open(partial_, std::ios::binary | std::ios::trunc);
      if (file_.good()) return;
      partial_.clear();
      fail(0);
#endif
    }
  }
  void close() noexcept {
#if KVPOLICY_STATE_POSIX
    if (file_ >= 0) ::close(std::exchange(file_, -1));
#else
    file_.close();
#endif
  }

  // The name is the folder's to remember. Where a folder cannot be synced, it does so in its own
  // time.
  void sync_folder() const noexcept {
#if KVPOLICY_STATE_POSIX
    const std::filesystem::path folder = path_.has_parent_path() ? path_.parent_path() : ".";
    const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return;
    (void)::fsync(file);
    ::close(file);
#endif
  }

  std::filesystem::path path_;
  std::filesystem::path partial_;  // empty once it is gone
#if KVPOLICY_STATE_POSIX
  int file_ = -1;
#else
  std::ofstream file_;
#endif
};

}  // namespace kvpolicy
