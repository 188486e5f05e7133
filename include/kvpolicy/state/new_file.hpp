// SPDX-License-Identifier: Apache-2.0
//
// Replaces a file as a whole or not at all: the new file is written under another name in the same folder,
// synced to the disk, and renamed. The library writes every file in this way.
#pragma once

#include <cerrno>
#include <cstddef>
#include <filesystem>
#include <random>
#include <span>
#include <string>
#include <string_view>
#include <system_error>
#include <utility>

/// 1 if files can be synced by POSIX calls, else 0.
#if __has_include(<fcntl.h>) && __has_include(<unistd.h>) && __has_include(<sys/resource.h>)
#define KVPOLICY_STATE_POSIX 1
#include <fcntl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>
#else
#define KVPOLICY_STATE_POSIX 0
#include <fstream>
#endif

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/core/try.hpp>
#include <kvpolicy/state/records.hpp>

namespace kvpolicy {

/// Who may open a file that did not exist before. An existing file keeps its permissions and, if the
/// process may set it, its owner.
enum class NewFileAccess {
  umask,  ///< as the process makes its files
  owner   ///< only the owner
};

/// What becomes of a symbolic link in the place of the file.
enum class NewFileLinks {
  follow,  ///< the file that it points to is replaced, and the link stays
  replace  ///< the link itself is
};

/// A new file that is deleted unless `replace` succeeds. A process that dies before leaves a file
/// `<name>.partial-<number>` and the old file unchanged.
class NewFile : public ByteSink {
 public:
  /// @throws StorageError if no file can be made in the folder, or `path` is something other than a file: a
  /// folder, a device, a pipe, or a link that leads back to itself
  explicit NewFile(const std::filesystem::path& path, NewFileAccess access = NewFileAccess::umask,
                   NewFileLinks links = NewFileLinks::follow)
      : name_{path.string()}, path_{path} {
    namespace fs = std::filesystem;
    std::error_code error;
    const bool is_link = fs::is_symlink(fs::symlink_status(path_, error));
    const bool replaces_link = is_link && links == NewFileLinks::replace;
    const fs::file_status status =
        replaces_link ? fs::file_status{fs::file_type::not_found} : fs::status(path_, error);
    const bool exists = status.type() != fs::file_type::not_found;
    if (exists && error) fail(error.value());
    require<StorageError>(!exists || fs::is_regular_file(status), name_,
                          ": is not a regular file, cannot be replaced by one");
    if (links == NewFileLinks::follow) follow_links();
    open(exists || access == NewFileAccess::owner);
    if (exists) keep_permissions();
  }
  ~NewFile() override {
    close();
    std::error_code ignored;
    if (!partial_.empty()) std::filesystem::remove(partial_, ignored);
  }

  void write(std::span<const std::byte> bytes) override {
#if KVPOLICY_STATE_POSIX
    while (!bytes.empty()) {
      require_within_limit(bytes.size());
      const ssize_t done = ::write(file_, bytes.data(), bytes.size());
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) fail(done < 0 ? errno : ENOSPC);
      written_ += static_cast<std::size_t>(done);
      bytes = bytes.subspan(static_cast<std::size_t>(done));
    }
#else
    file_.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    if (!file_.good()) fail(0);
#endif
  }

  /// Makes the path mean this file, also after a crash of the machine.
  /// @throws StorageError; the old file is then unchanged
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
    std::string reason;
    if (number != 0) reason.append(": ").append(std::generic_category().message(number));
    kvpolicy::fail<StorageError>(name_, ": cannot be written", reason);
  }

  // Replaces `path_` by the target of its links, which need not exist.
  void follow_links() {
    namespace fs = std::filesystem;
    std::error_code error;
    for (int links = 0; fs::is_symlink(fs::symlink_status(path_, error)); ++links) {
      const fs::path target = fs::read_symlink(path_, error);
      if (error || links == 40) fail(error ? error.value() : ELOOP);
      path_ = path_.parent_path() / target;
    }
  }

  // Opens a file under a name that no other process uses.
  void open(bool for_owner_only) {
    std::random_device random;
    for (int attempt = 0;; ++attempt) {
      partial_ = path_;
      partial_ += ".partial-";
      partial_ += std::to_string(random());
#if KVPOLICY_STATE_POSIX
      file_ = ::open(partial_.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, for_owner_only ? 0600 : 0666);
      if (file_ >= 0) return;
      if (errno == EEXIST && attempt < 100) continue;
      partial_.clear();
      fail(errno);
#else
      (void)for_owner_only;  // the standard library can only remove permissions later, which is too late
      std::error_code error;
      if (std::filesystem::exists(partial_, error) && attempt < 100) continue;
      file_.open(partial_, std::ios::binary | std::ios::trunc);
      if (file_.good()) return;
      partial_.clear();
      fail(0);
#endif
    }
  }

  void keep_permissions() {
#if KVPOLICY_STATE_POSIX
    struct stat old {};
    if (::stat(path_.c_str(), &old) != 0) return;  // deleted meanwhile: there is nothing to keep
    // Only root may change the owner, and not every file system has permissions. If they cannot be kept,
    // the new file has fewer permissions, never more.
    const bool same_group = ::fchown(file_, static_cast<uid_t>(-1), old.st_gid) == 0;
    [[maybe_unused]] int refused = ::fchown(file_, old.st_uid, static_cast<gid_t>(-1));
    refused = ::fchmod(file_, old.st_mode & (same_group ? 0777U : 0707U));
#endif
  }

#if KVPOLICY_STATE_POSIX
  // A write beyond the process's limit of file sizes raises a signal, which ends a process without a
  // handler. Checking first turns it into an error and leaves the program's signals alone.
  void require_within_limit(std::size_t more) const {
    rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return;
    if (written_ > limit.rlim_cur || more > limit.rlim_cur - written_) fail(EFBIG);
  }
#endif

  void close() noexcept {
#if KVPOLICY_STATE_POSIX
    if (file_ >= 0) ::close(std::exchange(file_, -1));
#else
    file_.close();
#endif
  }

  // The new name is stored in the folder, so the folder must be synced. If that is impossible, the system
  // does so later.
  void sync_folder() const noexcept {
#if KVPOLICY_STATE_POSIX
    std::filesystem::path folder;
    KVPOLICY_TRY { folder = path_.has_parent_path() ? path_.parent_path() : "."; }
    KVPOLICY_CATCH_ALL {
      return;  // no memory for the name
    }
    const int file = ::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    if (file < 0) return;
    (void)::fsync(file);
    ::close(file);
#endif
  }

  std::string name_;               // the caller's name for the file, for errors
  std::filesystem::path path_;     // the target of all links
  std::filesystem::path partial_;  // empty after it was renamed or deleted
#if KVPOLICY_STATE_POSIX
  int file_ = -1;
  std::size_t written_ = 0;
#else
  std::ofstream file_;
#endif
};

}  // namespace kvpolicy
