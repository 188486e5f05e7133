// SPDX-License-Identifier: Apache-2.0
//
// Writes and reads bytes in records, each with its checksum, so that a reader neither trusts a damaged byte
// nor allocates memory by a damaged size. Both directions are sequential, so a pipe works too.
//
//     "kvpcache"            8 bytes
//     0x01020304            4 bytes, in the byte order of the machine that writes
//     version               4 bytes
//     records: bytes        4 bytes, at most block_bytes
//              last         4 bytes, 1 for the last record, else 0
//              checksum     8 bytes: of the record, of these two numbers and of the checksum before
//              the bytes
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <istream>
#include <ostream>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/state/checksum.hpp>

namespace kvpolicy {

/// A destination for saved bytes. @throws StorageError
class ByteSink {
 public:
  ByteSink() = default;
  ByteSink(const ByteSink&) = delete;
  ByteSink& operator=(const ByteSink&) = delete;
  virtual ~ByteSink() = default;
  virtual void write(std::span<const std::byte> bytes) = 0;
};

/// Keeps nothing.
class NoSink final : public ByteSink {
 public:
  void write(std::span<const std::byte>) override {}
};

/// A std::ostream as a sink.
class StreamSink : public ByteSink {
 public:
  explicit StreamSink(std::ostream& stream) : stream_{stream} {}
  void write(std::span<const std::byte> bytes) override {
    stream_.write(reinterpret_cast<const char*>(bytes.data()), static_cast<std::streamsize>(bytes.size()));
    // Flushes at once, so that a stream that cannot take the bytes fails here.
    stream_.flush();
    require<StorageError>(stream_.good(), "saved cache: the stream does not take ", bytes.size(),
                          " more bytes");
  }

 private:
  std::ostream& stream_;
};

/// The first bytes of every saved cache.
inline constexpr std::array<char, 8> saved_magic{'k', 'v', 'p', 'c', 'a', 'c', 'h', 'e'};
/// The version that is written and read.
inline constexpr std::uint32_t saved_version = 1;
/// Most bytes of a record.
inline constexpr std::size_t block_bytes = std::size_t{1} << 20;

/// The beginning of a file, before its records.
struct SavedPrefix {
  std::array<char, 8> magic = saved_magic;
  std::uint32_t byte_order = 0x01020304U;
  std::uint32_t version = saved_version;
};
/// The beginning of a record, before its bytes.
struct RecordHeader {
  std::uint32_t bytes = 0;
  std::uint32_t last = 0;
  std::uint64_t checksum = 0;

  [[nodiscard]] std::uint64_t expected(std::uint64_t before, std::span<const std::byte> data) const {
    const RecordHeader covered{bytes, last, before};
    const auto seed = kvpolicy::checksum(std::as_bytes(std::span{&covered, 1}));
    return kvpolicy::checksum(data, seed);
  }
};
static_assert(sizeof(SavedPrefix) == 16 && sizeof(RecordHeader) == 16, "no padding in a file");

/// Writes bytes as records. Not synchronised.
class RecordWriter {
 public:
  explicit RecordWriter(ByteSink& sink) : sink_{sink} {
    const SavedPrefix prefix;
    record_.resize(sizeof(SavedPrefix) + sizeof(RecordHeader));
    std::memcpy(record_.data(), &prefix, sizeof prefix);
    header_at_ = sizeof prefix;
  }

  void write(std::span<const std::byte> bytes) {
    while (!bytes.empty()) {
      const std::size_t count = std::min(bytes.size(), block_bytes - filled());
      record_.insert(record_.end(), bytes.begin(), bytes.begin() + static_cast<std::ptrdiff_t>(count));
      bytes = bytes.subspan(count);
      if (filled() == block_bytes) send(false);
    }
  }
  /// Writes the last record. Nothing may be written after it.
  void finish() { send(true); }

 private:
  [[nodiscard]] std::size_t filled() const { return record_.size() - header_at_ - sizeof(RecordHeader); }

  void send(bool last) {
    RecordHeader header{static_cast<std::uint32_t>(filled()), last ? 1U : 0U, 0};
    header.checksum = checksum_ =
        header.expected(checksum_, std::span{record_}.subspan(header_at_ + sizeof header));
    std::memcpy(record_.data() + header_at_, &header, sizeof header);
    sink_.write(record_);
    header_at_ = 0;
    record_.resize(sizeof header);
  }

  ByteSink& sink_;
  std::vector<std::byte> record_;  // the prefix before the first record, the header, the bytes
  std::size_t header_at_ = 0;
  std::uint64_t checksum_ = 0;  // of the record before
};

/// Reads the bytes of records whose checksums are right. Error messages begin with `name`. Not
/// synchronised.
class RecordReader {
 public:
  /// @throws FormatError if this is no saved cache that this library can read; StorageError if the
  /// stream fails
  RecordReader(std::istream& stream, std::string name) : stream_{stream}, name_{std::move(name)} {
    SavedPrefix prefix;
    const std::size_t count = fetch(std::as_writable_bytes(std::span{&prefix, 1}));
    require<FormatError>(count >= sizeof prefix.magic && prefix.magic == saved_magic, name_,
                         ": is not a saved cache: its first 8 bytes must be \"kvpcache\"");
    require<FormatError>(count == sizeof prefix, name_, ": is cut off after ", count, " bytes");
    const SavedPrefix own;
    require<FormatError>(prefix.byte_order == own.byte_order, name_,
                         prefix.byte_order == 0x04030201U
                             ? ": was written on a machine of the other byte order"
                             : ": is damaged in its first 16 bytes");
    require<FormatError>(prefix.version == saved_version, name_, ": is of version ", prefix.version,
                         ", must be ", saved_version);
  }

  [[nodiscard]] const std::string& name() const { return name_; }

  /// @throws FormatError if the file is damaged or ends too early, StorageError if the stream fails
  void read(std::span<std::byte> out) {
    while (!out.empty()) {
      if (next_ == record_.size()) {
        require<FormatError>(!last_, name_, ": ends where more must follow");
        fetch_record();
        continue;
      }
      const std::size_t count = std::min(out.size(), record_.size() - next_);
      std::memcpy(out.data(), record_.data() + next_, count);
      next_ += count;
      out = out.subspan(count);
    }
  }

  /// Reads the last record to its end. The stream then stands right after it; if the stream holds only this
  /// cache (`alone`), it must be at its end.
  /// @throws as `read`
  void finish(bool alone) {
    if (next_ == record_.size() && !last_) fetch_record();
    require<FormatError>(next_ == record_.size() && last_, name_, ": continues where the cache should end");
    require<FormatError>(!alone || stream_.peek() == std::istream::traits_type::eof(), name_,
                         ": continues after its last record");
  }

 private:
  // Reads as many bytes as there are, at most out.size(). Returns their number.
  std::size_t fetch(std::span<std::byte> out) {
    stream_.read(reinterpret_cast<char*>(out.data()), static_cast<std::streamsize>(out.size()));
    require<StorageError>(!stream_.bad(), name_, ": cannot be read");
    return static_cast<std::size_t>(stream_.gcount());
  }

  void fetch_record() {
    ++number_;
    RecordHeader header;
    const std::size_t count = fetch(std::as_writable_bytes(std::span{&header, 1}));
    require<FormatError>(count == sizeof header, name_, ": is cut off before record ", number_);
    require<FormatError>(header.bytes <= block_bytes && header.last <= 1, name_, ": record ", number_,
                         " is damaged: it claims ", header.bytes, " bytes, of at most ", block_bytes);
    record_.resize(header.bytes);
    next_ = 0;
    require<FormatError>(fetch(record_) == header.bytes, name_, ": is cut off inside record ", number_);
    const std::uint64_t expected = header.expected(checksum_, record_);
    require<FormatError>(header.checksum == expected, name_, ": record ", number_,
                         " is damaged: its checksum is ", header.checksum, ", must be ", expected);
    checksum_ = expected;
    last_ = header.last == 1;
  }

  std::istream& stream_;
  std::string name_;
  std::vector<std::byte> record_;
  std::size_t next_ = 0;    // index of the next byte in it
  std::size_t number_ = 0;  // its number, counted from 1
  bool last_ = false;
  std::uint64_t checksum_ = 0;
};

}  // namespace kvpolicy
