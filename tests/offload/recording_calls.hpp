// SPDX-License-Identifier: Apache-2.0
//
// Records the file calls of the real system, any of which can be made to fail.
#pragma once

#include <sys/mman.h>
#include <sys/vfs.h>

#include <cstddef>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include <kvpolicy/offload/file_calls.hpp>

namespace test {

/// `limit_failures(n, error)`: of all calls that can fail, the first n succeed and all later ones fail.
/// `errors["read"]`: every call of that name fails.
class RecordingCalls : public kvpolicy::offload::FileCalls {
 public:
  std::map<std::string, int> errors;
  std::map<std::string, std::size_t> counts;
  std::byte* mapping = nullptr;
  std::size_t failures = 0;
  std::optional<std::size_t> limit;  // limit of the size of files

  struct Part {
    std::size_t first, last;
  };
  std::vector<Part> ahead;  // parts that were read ahead, in bytes of the file

  void fail_after(std::size_t successes, int error) {
    left_ = successes;
    error_ = error;
  }
  void recover() { left_.reset(); }

  int open(const std::string& folder, int& file) override {
    const int error = verdict("open");
    return error != 0 ? error : FileCalls::open(folder, file);
  }
  int map(int file, std::size_t bytes, std::byte*& start) override {
    const int failure = verdict("map");
    if (failure != 0) return failure;
    const int error = FileCalls::map(file, bytes, start);
    mapping = start;
    return error;
  }
  void close(int file, std::byte* start, std::size_t bytes) noexcept override {
    ++closed;
    FileCalls::close(file, start, bytes);
  }
  std::size_t file_limit() override { return limit ? *limit : FileCalls::file_limit(); }
  int allocate(int file, std::size_t offset, std::size_t bytes) override {
    const int error = verdict("allocate");
    return error != 0 ? error : FileCalls::allocate(file, offset, bytes);
  }
  int write(int file, std::size_t offset, const std::byte* from, std::size_t bytes) override {
    const int error = verdict("write");
    return error != 0 ? error : FileCalls::write(file, offset, from, bytes);
  }
  int sync(int file, std::size_t offset, std::size_t bytes) override {
    const int error = verdict("sync");
    return error != 0 ? error : FileCalls::sync(file, offset, bytes);
  }
  int populate(std::byte* start, std::size_t bytes) override {
    const int error = verdict("populate");
    return error != 0 ? error : FileCalls::populate(start, bytes);
  }
  int read(int file, std::size_t offset, std::size_t bytes) override {
    const int error = verdict("read");
    return error != 0 ? error : FileCalls::read(file, offset, bytes);
  }
  void read_ahead(std::byte* start, std::size_t bytes) noexcept override {
    const auto first = static_cast<std::size_t>(start - mapping);
    ahead.push_back({first, first + bytes});
    FileCalls::read_ahead(start, bytes);
  }

  std::size_t closed = 0;

 private:
  int verdict(const std::string& name) {
    ++counts[name];
    const auto told = errors.find(name);
    if (told != errors.end()) {
      ++failures;
      return told->second;
    }
    if (!left_) return 0;
    if (*left_ > 0) {
      --*left_;
      return 0;
    }
    ++failures;
    return error_;
  }

  std::optional<std::size_t> left_;
  int error_ = 0;
};

/// How many of the first `bytes` bytes of a mapping are in memory.
inline std::size_t bytes_in_memory(std::byte* mapping, std::size_t bytes) {
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  std::vector<unsigned char> pages((bytes + page - 1) / page);
  if (pages.empty()) return 0;
  if (::mincore(mapping, bytes, pages.data()) != 0) return bytes;
  std::size_t count = 0;
  for (const unsigned char one : pages) count += one & 1U;
  return count * page;
}

/// Whether files in this folder are kept in memory, which then cannot be released.
inline bool is_in_memory(const std::string& folder) {
  struct statfs info {};
  constexpr long tmpfs = 0x01021994, ramfs = 0x858458f6;
  return ::statfs(folder.c_str(), &info) == 0 &&
         (static_cast<long>(info.f_type) == tmpfs || static_cast<long>(info.f_type) == ramfs);
}

}  // namespace test
