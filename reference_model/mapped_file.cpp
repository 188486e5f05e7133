// SPDX-License-Identifier: Apache-2.0
#include <reference_model/mapped_file.hpp>

#include <memory>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/state/regular_file.hpp>

#if __has_include(<sys/mman.h>) && __has_include(<unistd.h>)
#define KVPOLICY_HAVE_MMAP
#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <system_error>
#else
#include <filesystem>
#include <fstream>
#endif

namespace kvpolicy::reference {

#ifdef KVPOLICY_HAVE_MMAP

MappedFile::MappedFile(const std::string& path) : path_{path} {
  require_regular_file<FormatError>(path);
  const auto check = [&](bool fine, const char* what) {
    if (fine) return;
    const int error = errno;
    if (file_ >= 0) ::close(file_);
    fail<FormatError>(path, ": cannot be ", what, ": ", std::system_category().message(error));
  };
  file_ = ::open(path.c_str(), O_RDONLY | O_CLOEXEC);
  check(file_ >= 0, "opened");
  struct stat status {};
  check(::fstat(file_, &status) == 0, "read");
  size_ = static_cast<std::uint64_t>(status.st_size);
  if (size_ == 0) return;  // an empty file has no mapping
  void* memory = ::mmap(nullptr, size_, PROT_READ, MAP_PRIVATE, file_, 0);
  check(memory != MAP_FAILED, "mapped");
  data_ = static_cast<const std::byte*>(memory);
}

MappedFile::~MappedFile() {
  if (data_ != nullptr) ::munmap(const_cast<std::byte*>(data_), size_);
  ::close(file_);
}

void MappedFile::release(std::span<const std::byte> range) const noexcept {
  // Only whole pages inside the range.
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGE_SIZE));
  void* first = const_cast<std::byte*>(range.data());
  std::size_t left = range.size();
  if (std::align(page, page, first, left) != nullptr) ::madvise(first, left / page * page, MADV_DONTNEED);
}

namespace {
std::uint64_t size_now(int file, std::uint64_t size) {
  struct stat status {};
  return ::fstat(file, &status) == 0 ? static_cast<std::uint64_t>(status.st_size) : size;
}
}  // namespace

#else

MappedFile::MappedFile(const std::string& path) : path_{path} {
  require_regular_file<FormatError>(path);
  std::error_code error;
  size_ = std::filesystem::file_size(path, error);
  require<FormatError>(!error, path, ": cannot be read: ", error.message());
  auto copy = std::make_unique<std::byte[]>(static_cast<std::size_t>(size_));
  std::ifstream file{path, std::ios::binary};
  file.read(reinterpret_cast<char*>(copy.get()), static_cast<std::streamsize>(size_));
  require<FormatError>(file.good(), path, ": cannot be read");
  data_ = copy.release();
}

MappedFile::~MappedFile() { delete[] data_; }

void MappedFile::release(std::span<const std::byte>) const noexcept {}

namespace {
std::uint64_t size_now(int, std::uint64_t size) { return size; }
}  // namespace

#endif

std::span<const std::byte> MappedFile::bytes(std::uint64_t first, std::size_t count) const {
  require<FormatError>(first <= size_ && count <= size_ - first, path_, ": has ", size_, " bytes, bytes ",
                       first, " to ", first, " + ", count, " were asked for");
  const std::uint64_t now = size_now(file_, size_);
  require<FormatError>(now >= size_, path_, ": had ", size_, " bytes when it was opened, now has ", now,
                       ": it must not be shortened while it is read");
  return {data_ + first, count};
}

}  // namespace kvpolicy::reference
