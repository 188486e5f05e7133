// SPDX-License-Identifier: Apache-2.0
//
// Row memory in a file, for texts that need more memory than they should take. Rows have ordinary addresses
// in a mapping, so every engine can read them. They are read into memory before they are used, and released
// when more than `resident_bytes` are in memory.
//
//     offload::FileResource file{{.folder = "/var/tmp", .resident_bytes = std::size_t{1} << 30}};
//     using Engine = offload::FetchingEngine<cpu::Engine<>>;
//     KvCache<E, Engine> cache{plan, {.slow_memory = &file}, Engine{{}, file}};
//
// A mapped file can fail in two ways that a program cannot handle: a write to a full disk and a
// read of a bad sector both raise SIGBUS. Therefore space is allocated when memory is requested,
// and rows are written by a call that reports errors and is waited for, so that a row leaves fast
// memory only once it is on the disk. offload::FetchingEngine reads rows by a call that reports errors as
// well. One risk remains: the system may evict rows, for lack of memory, between that call and
// their use.
#pragma once

#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstddef>
#include <limits>
#include <map>
#include <mutex>
#include <new>
#include <span>
#include <string>
#include <system_error>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/memory/slow_memory.hpp>
#include <kvpolicy/offload/file_calls.hpp>
#include <kvpolicy/offload/residency.hpp>

namespace kvpolicy::offload {

/// Options of a FileResource: where its file is, and how large it may grow on the disk and in memory.
struct FileOptions {
  /// Folder of the file. It should be on a disk: a folder in memory (tmpfs) saves no memory. The
  /// file has no name and disappears with the resource or the program.
  std::string folder;
  /// Largest size of the file; the resource reserves as many addresses.
  std::size_t max_bytes = std::size_t{1} << 40;
  /// How much of the file may stay in memory. The rows of the layer that is attended are in memory
  /// in any case; the next layer's rows are read ahead if both fit. 0: the system decides.
  std::size_t resident_bytes = 0;
  /// The file grows by this much at a time, for allocations of one size.
  std::size_t slab_bytes = std::size_t{1} << 20;

  /// @throws ConfigError
  void validate() const {
    require(!folder.empty(), "FileOptions: folder is empty, must name a folder on a disk");
    require(slab_bytes > 0 && slab_bytes <= max_bytes, "FileOptions: slab_bytes is ", slab_bytes,
            ", must be 1 to max_bytes = ", max_bytes);
    require(max_bytes <= std::size_t{1} << 46, "FileOptions: max_bytes is ", max_bytes,
            ", must be at most 2^46");
  }
};

/// Slow memory in a file. Freed allocations are reused for allocations of the same size; the file never
/// shrinks. May be used from several threads (forks of a cache, say).
class FileResource final : public SlowMemory {
 public:
  /// @throws ConfigError; StorageError if the folder does not exist or no file can be made in it
  explicit FileResource(const FileOptions& options, FileCalls& calls = FileCalls::of_system())
      : options_{options},
        calls_{calls},
        page_{static_cast<std::size_t>(::sysconf(_SC_PAGESIZE))},
        piece_{std::max(page_, smallest_piece)},
        residency_{options.resident_bytes == 0 ? unlimited : options.resident_bytes / piece_} {
    options.validate();
    const int error = calls_.open(options_.folder, file_);
    if (error != 0) fail("cannot make a file", error, "name another folder");
    const int map_error = calls_.map(file_, options_.max_bytes, start_);
    if (map_error == 0) return;
    calls_.close(file_, nullptr, 0);
    fail(message("cannot map ", options_.max_bytes, " bytes"), map_error, "lower max_bytes");
  }
  FileResource(const FileResource&) = delete;
  FileResource& operator=(const FileResource&) = delete;
  ~FileResource() override { calls_.close(file_, start_, options_.max_bytes); }

  [[nodiscard]] const FileOptions& options() const { return options_; }
  /// Bytes of live allocations; `file_bytes` is the size of the file.
  [[nodiscard]] std::size_t live_bytes() const {
    const std::lock_guard lock{mutex_};
    return live_bytes_;
  }
  [[nodiscard]] std::size_t file_bytes() const {
    const std::lock_guard lock{mutex_};
    return file_bytes_;
  }
  /// Bytes that the resource counts as being in memory: an upper bound, unless rows were read
  /// without being fetched.
  [[nodiscard]] std::size_t resident_bytes() const {
    const std::lock_guard lock{mutex_};
    return residency_.resident() * piece_;
  }

  // ---- SlowMemory

  [[nodiscard]] bool holds(const std::byte* address) const noexcept override {
    return address >= start_ && address < start_ + options_.max_bytes;
  }

  /// @throws StorageError for a part that cannot be read
  void fetch(std::span<const Range> ranges) override {
    if (ranges.empty()) return;
    const std::vector<Part> parts = whole_pages(ranges);
    begin_to_read(parts, Residency::Use::fetch);
    for (const Part& part : parts) {
      const int error = bring(part);
      if (error == 0) continue;
      fail(message("cannot read ", part.last - part.first, " bytes at ", part.first), error,
           "the rows there are lost: read the text again, with another folder");
    }
  }

  void fetch_ahead(std::span<const Range> ranges) noexcept override {
    KVPOLICY_TRY {
      if (!ranges.empty()) begin_to_read(whole_pages(ranges), Residency::Use::ahead);
    }
    KVPOLICY_CATCH(const std::bad_alloc&) {  // reading ahead is only a hint
    }
  }

  void write(std::span<const Copy> copies) override {
    std::vector<Range> ranges;
    ranges.reserve(copies.size());
    for (const Copy& copy : copies) ranges.emplace_back(copy.to, copy.bytes);
    const std::vector<Part> parts = whole_pages(ranges);
    for (const Copy& copy : copies) {
      const std::size_t offset = offset_of(copy.to);
      const int error = calls_.write(file_, offset, copy.from, copy.bytes);
      if (error != 0) fail(message("cannot write ", copy.bytes, " bytes at ", offset), error, disk_help);
    }
    for (const Part& part : parts) {
      const int error = calls_.sync(file_, part.first, part.last - part.first);
      if (error != 0) {
        fail(message("cannot write ", part.last - part.first, " bytes at ", part.first), error, disk_help);
      }
    }
    const std::lock_guard lock{mutex_};
    residency_.begin(Residency::Use::other);
    for_each_piece(parts, [&](std::size_t piece) { residency_.use(piece); });
    shrink();
  }

 private:
  // A part of the file, in bytes from its start: whole pages.
  struct Part {
    std::size_t first, last;
  };
  struct SizeClass {
    std::vector<std::size_t> free;  // offsets
    std::size_t blocks = 0;         // free or not
  };

  // Smallest unit that is fetched and released, so that a long text needs few entries.
  static constexpr std::size_t smallest_piece = std::size_t{16} << 10;
  static constexpr std::size_t unlimited = std::numeric_limits<std::size_t>::max();
  static constexpr const char* disk_help = "free space on the disk, or use another one";

  template <class What>
  [[noreturn]] void fail(const What& what, int error, const char* help) const {
    kvpolicy::fail<StorageError>("FileResource: ", what, " in ", options_.folder, ": ",
                                 std::generic_category().message(error), " (", help, ")");
  }

  [[nodiscard]] int bring(const Part& part) {
    const std::size_t bytes = part.last - part.first;
    const int error = calls_.populate(start_ + part.first, bytes);
    if (error == 0) return 0;
    // `populate` does not report the reason, `read` does. If `read` succeeds, the system did not
    // know `populate` (EINVAL), or `populate` may succeed now.
    const int reason = calls_.read(file_, part.first, bytes);
    if (reason != 0 || error == EINVAL) return reason;
    return calls_.populate(start_ + part.first, bytes);
  }

  [[nodiscard]] std::size_t offset_of(const std::byte* address) const {
    return static_cast<std::size_t>(address - start_);
  }

  void* do_allocate(std::size_t bytes, std::size_t alignment) override {
    if (alignment > page_ || bytes > options_.max_bytes) throw_error(std::bad_alloc{});
    const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), std::max<std::size_t>(alignment, 64));
    const std::lock_guard lock{mutex_};
    SizeClass& own = classes_[size];
    if (own.free.empty()) add_slab(own, size);
    const std::size_t offset = own.free.back();
    own.free.pop_back();
    live_bytes_ += size;
    return start_ + offset;
  }
  void do_deallocate(void* block, std::size_t bytes, std::size_t alignment) override {
    const std::size_t size = round_up(std::max<std::size_t>(bytes, 1), std::max<std::size_t>(alignment, 64));
    const std::lock_guard lock{mutex_};
    classes_.find(size)->second.free.push_back(offset_of(static_cast<std::byte*>(block)));  // has capacity
    live_bytes_ -= size;
  }
  [[nodiscard]] bool do_is_equal(const memory_resource& other) const noexcept override {
    return this == &other;
  }

  void add_slab(SizeClass& own, std::size_t size) {
    const std::size_t limit = std::min(options_.max_bytes, calls_.file_limit());
    const std::size_t left = (limit - std::min(limit, file_bytes_)) / piece_ * piece_;
    const std::size_t blocks = std::min(std::max<std::size_t>(options_.slab_bytes / size, 1), left / size);
    if (blocks == 0) {
      kvpolicy::fail<StorageError>("FileResource: no room for ", size, " more bytes after ", file_bytes_,
                                   " in ", options_.folder, ", the file may have ", limit,
                                   " (raise max_bytes, or the process's limit of file sizes)");
    }
    const std::size_t bytes = round_up(blocks * size, piece_);
    own.free.reserve(own.blocks + blocks);
    residency_.grow((file_bytes_ + bytes) / piece_);
    const int error = calls_.allocate(file_, file_bytes_, bytes);
    if (error != 0) {
      fail(message("no room for ", bytes, " more bytes after ", file_bytes_), error, disk_help);
    }
    own.blocks += blocks;
    for (std::size_t block = blocks; block > 0; --block) {
      own.free.push_back(file_bytes_ + (block - 1) * size);
    }
    file_bytes_ += bytes;
  }

  [[nodiscard]] static std::size_t round_up(std::size_t bytes, std::size_t unit) {
    return (bytes + unit - 1) / unit * unit;
  }

  // The whole pages of the ranges, in ascending order, merged if they touch.
  [[nodiscard]] std::vector<Part> whole_pages(std::span<const Range> ranges) const {
    std::vector<Part> parts;
    const auto add = [&](const Part& part) {
      if (!parts.empty() && part.first <= parts.back().last && part.first >= parts.back().first) {
        parts.back().last = std::max(parts.back().last, part.last);
      } else {
        parts.push_back(part);
      }
    };
    for (const Range& range : ranges) {
      if (range.empty()) continue;
      const std::size_t first = offset_of(range.data());
      add({first / page_ * page_, round_up(first + range.size(), page_)});
    }
    std::ranges::sort(parts, {}, &Part::first);
    std::vector<Part> unsorted;
    unsorted.swap(parts);
    parts.reserve(unsorted.size());
    for (const Part& part : unsorted) add(part);
    return parts;
  }

  template <class Visit>
  void for_each_piece(const std::vector<Part>& parts, Visit visit) const {
    std::size_t next = 0;  // several parts may be in one piece
    for (const Part& part : parts) {
      for (next = std::max(next, part.first / piece_); next * piece_ < part.last; ++next) visit(next);
    }
  }

  // Releases pieces over the budget, neighbouring ones together: a page of the page cache may be
  // larger than a piece.
  void shrink() noexcept {
    std::size_t first = 0;
    std::size_t last = 0;
    const auto drop = [&] {
      if (first == last) return;
      const std::size_t from = first * piece_;
      const std::size_t to = std::min(last * piece_, file_bytes_);
      calls_.drop(file_, from, start_ + from, to - from);
    };
    residency_.shrink([&](std::size_t piece) {
      if (piece + 1 == first) {
        --first;
      } else if (piece == last && first != last) {
        ++last;
      } else {
        drop();
        first = piece;
        last = piece + 1;
      }
    });
    drop();
  }

  // Makes room for the parts and starts reading those that are not in memory.
  void begin_to_read(const std::vector<Part>& parts, Residency::Use use) {
    std::vector<Part> absent;
    {
      const std::lock_guard lock{mutex_};
      std::size_t room = residency_.room();  // for reading ahead
      residency_.begin(use);
      for_each_piece(parts, [&](std::size_t piece) {
        if (use == Residency::Use::ahead) {
          if (room == 0) return;
          --room;
        }
        if (!residency_.is_resident(piece)) {
          const std::size_t from = piece * piece_;
          const std::size_t to = std::min(from + piece_, file_bytes_);
          if (!absent.empty() && absent.back().last == from) {
            absent.back().last = to;
          } else {
            absent.push_back({from, to});
          }
        }
        residency_.use(piece);
      });
      shrink();
    }
    // Reads only the requested pages of the absent pieces.
    std::size_t p = 0;
    for (const Part& piece : absent) {
      while (p < parts.size() && parts[p].last <= piece.first) ++p;
      for (std::size_t i = p; i < parts.size() && parts[i].first < piece.last; ++i) {
        const std::size_t from = std::max(parts[i].first, piece.first);
        calls_.read_ahead(start_ + from, std::min(parts[i].last, piece.last) - from);
      }
    }
  }

  FileOptions options_;
  FileCalls& calls_;
  std::size_t page_;   // size of the system's pages, in bytes
  std::size_t piece_;  // size of the pieces that Residency counts, in bytes
  int file_ = -1;
  std::byte* start_ = nullptr;
  mutable std::mutex mutex_;                  // guards all members below
  std::map<std::size_t, SizeClass> classes_;  // by the size of their allocations
  std::size_t file_bytes_ = 0;
  std::size_t live_bytes_ = 0;
  Residency residency_;
};

}  // namespace kvpolicy::offload
