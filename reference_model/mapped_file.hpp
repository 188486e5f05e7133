// SPDX-License-Identifier: Apache-2.0
//
// A whole file as read-only bytes: mapped where the system can (Linux, macOS), otherwise read into memory.
// A mapping takes no memory of its own: the bytes are those of the system's file cache, which all
// processes share and which the system may drop and read again.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>

namespace kvpolicy::reference {

/// The file may be renamed or removed while it is mapped. It must not be overwritten or shortened: the
/// system ends a process that reads mapped bytes which the file no longer has (SIGBUS). Programs that
/// replace a file as a whole, as downloads and `NewFile` do, are safe. Several threads may read it.
class MappedFile {
 public:
  /// @throws FormatError if the path is not a regular file or cannot be read
  explicit MappedFile(const std::string& path);
  ~MappedFile();
  MappedFile(const MappedFile&) = delete;
  MappedFile& operator=(const MappedFile&) = delete;

  [[nodiscard]] const std::string& path() const noexcept { return path_; }

  [[nodiscard]] std::uint64_t size() const noexcept { return size_; }

  /// The bytes [first, first + count).
  /// @throws FormatError if the file does not have them, or has been shortened since it was opened
  [[nodiscard]] std::span<const std::byte> bytes(std::uint64_t first, std::size_t count) const;

  /// Says that the range will not be needed soon, so its memory may be used for other things. Reading it
  /// again is slow, but allowed. Only a hint.
  void release(std::span<const std::byte> range) const noexcept;

 private:
  std::string path_;
  int file_ = -1;  // open as long as the mapping, to ask for the file's size
  const std::byte* data_ = nullptr;
  std::uint64_t size_ = 0;
};

}  // namespace kvpolicy::reference
