// SPDX-License-Identifier: Apache-2.0
//
// All calls of a FileResource to the operating system, in one class, so that tests can make any of them
// fail. They need Linux: only Linux has calls that report a failing disk as an error instead of a signal.
#pragma once

#if !defined(__linux__)
#error "kvpolicy/offload: files as row memory need Linux; leave this header out elsewhere"
#endif

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstddef>
#include <cstdlib>
#include <limits>
#include <string>
#include <utility>

namespace kvpolicy::offload {

/// Functions that can fail return 0 or an errno. All may be called from several threads.
class FileCalls {
 public:
  FileCalls() = default;
  FileCalls(const FileCalls&) = delete;
  FileCalls& operator=(const FileCalls&) = delete;
  virtual ~FileCalls() = default;

  /// Opens a file without a name in `folder`. Its space is free again after it is closed, also if the
  /// program crashes.
  virtual int open(const std::string& folder, int& file) {
    file = ::open(folder.c_str(), O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, 0600);
    if (file >= 0) return 0;
    if (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL) return errno;
    std::string name = folder + "/kvpolicy-XXXXXX";  // a file system without unnamed files
    file = ::mkostemp(name.data(), O_CLOEXEC);
    if (file < 0) return errno;
    if (::unlink(name.c_str()) == 0) return 0;
    const int why = errno;
    ::close(std::exchange(file, -1));
    return why;
  }
  /// Maps the first `bytes` bytes of the file, which may still be shorter.
  virtual int map(int file, std::size_t bytes, std::byte*& start) {
    void* mapped = ::mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, file, 0);
    if (mapped == MAP_FAILED) return errno;
    start = static_cast<std::byte*>(mapped);
    // The resource requests what it needs; the kernel's own read-ahead would read other rows too.
    ::madvise(mapped, bytes, MADV_RANDOM);
    return 0;
  }
  virtual void close(int file, std::byte* start, std::size_t bytes) noexcept {
    if (start != nullptr) ::munmap(start, bytes);
    if (file >= 0) ::close(file);
  }
  /// The largest file that this process may write; growing beyond it raises a signal.
  virtual std::size_t file_limit() {
    rlimit limit{};
    if (::getrlimit(RLIMIT_FSIZE, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) {
      return std::numeric_limits<std::size_t>::max();
    }
    return static_cast<std::size_t>(limit.rlim_cur);
  }
  /// Allocates space on the disk now, instead of at the first write.
  virtual int allocate(int file, std::size_t offset, std::size_t bytes) {
    int error = 0;
    do {
      error = ::posix_fallocate(file, static_cast<off_t>(offset), static_cast<off_t>(bytes));
    } while (error == EINTR);
    return error;
  }
  virtual int write(int file, std::size_t offset, const std::byte* from, std::size_t bytes) {
    while (bytes > 0) {
      const ssize_t done = ::pwrite(file, from, bytes, static_cast<off_t>(offset));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return done < 0 ? errno : EIO;
      from += done;
      offset += static_cast<std::size_t>(done);
      bytes -= static_cast<std::size_t>(done);
    }
    return 0;
  }
  /// Waits until what was written to this part of the file is on the disk.
  virtual int sync(int file, std::size_t offset, std::size_t bytes) {
    const int done =
        ::sync_file_range(file, static_cast<off_t>(offset), static_cast<off_t>(bytes),
                          SYNC_FILE_RANGE_WAIT_BEFORE | SYNC_FILE_RANGE_WRITE | SYNC_FILE_RANGE_WAIT_AFTER);
    if (done == 0) return 0;
    // A file system that cannot sync a part of a file has to sync the whole file.
    if (errno == EINVAL || errno == ENOSYS || errno == ESPIPE) return ::fdatasync(file) == 0 ? 0 : errno;
    return errno;
  }
  /// Reads whole pages of the mapping into memory and reports failure. Before Linux 5.14 it returns
  /// EINVAL; `read` then reads the pages as well.
  virtual int populate(std::byte* start, std::size_t bytes) {
#ifdef MADV_POPULATE_READ
    constexpr int populate_read = MADV_POPULATE_READ;
#else
    constexpr int populate_read = 22;
#endif
    while (::madvise(start, bytes, populate_read) != 0) {
      if (errno != EINTR && errno != EAGAIN) return errno;
    }
    return 0;
  }
  /// Reads a part of the file and discards it, to get the error code of a failing disk.
  virtual int read(int file, std::size_t offset, std::size_t bytes) {
    std::array<std::byte, 16384> forgotten;
    while (bytes > 0) {
      const std::size_t part = std::min(bytes, forgotten.size());
      const ssize_t done = ::pread(file, forgotten.data(), part, static_cast<off_t>(offset));
      if (done < 0 && errno == EINTR) continue;
      if (done <= 0) return done < 0 ? errno : EIO;
      offset += static_cast<std::size_t>(done);
      bytes -= static_cast<std::size_t>(done);
    }
    return 0;
  }
  /// Starts reading whole pages of the mapping without waiting.
  virtual void read_ahead(std::byte* start, std::size_t bytes) noexcept {
    // The kernel honours one read-ahead window per request, so the range is split into small
    // requests.
    constexpr std::size_t piece = std::size_t{128} << 10;
    for (std::size_t done = 0; done < bytes; done += piece) {
      ::madvise(start + done, std::min(piece, bytes - done), MADV_WILLNEED);
    }
  }
  /// Releases the memory of whole pages: first this process's mapping, then the page cache, which
  /// keeps pages that are not written yet or that another process maps.
  virtual void drop(int file, std::size_t offset, std::byte* start, std::size_t bytes) noexcept {
    ::madvise(start, bytes, MADV_DONTNEED);
    ::posix_fadvise(file, static_cast<off_t>(offset), static_cast<off_t>(bytes), POSIX_FADV_DONTNEED);
  }

  /// The calls of the real operating system.
  [[nodiscard]] static FileCalls& of_system() {
    static FileCalls calls;
    return calls;
  }
};

}  // namespace kvpolicy::offload
