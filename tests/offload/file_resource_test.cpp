// SPDX-License-Identifier: Apache-2.0
//
// A file as memory: allocations keep their contents while most of them are not in memory, limits and
// faults are named errors, and released memory is really released.
#include <doctest/doctest.h>

#include <sys/resource.h>

#include <cerrno>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <map>
#include <memory_resource>
#include <vector>

#include <kvpolicy/memory/limited_memory.hpp>
#include <kvpolicy/memory/page_pool.hpp>
#include <kvpolicy/offload/file_resource.hpp>

#include "offload/recording_calls.hpp"
#include "support/compare.hpp"
#include "support/temporary_folder.hpp"
#include "support/tensors.hpp"

using kvpolicy::ConfigError;
using kvpolicy::LimitedMemory;
using kvpolicy::PagePool;
using kvpolicy::SlowMemory;
using kvpolicy::StorageError;
using kvpolicy::TierMemory;
using kvpolicy::offload::FileOptions;
using kvpolicy::offload::FileResource;
using test::contains;
using test::thrown;

namespace {

constexpr std::size_t MiB = std::size_t{1} << 20;

std::vector<std::byte> numbers(std::size_t seed, std::size_t bytes) {
  std::vector<std::byte> all(bytes);
  for (std::size_t i = 0; i < bytes; ++i) all[i] = static_cast<std::byte>(seed * 131 + i * 7 + i / 251);
  return all;
}

struct Block {
  std::byte* start;
  std::size_t bytes, alignment, seed;
};

void write(FileResource& file, const Block& block) {
  const auto source = numbers(block.seed, block.bytes);
  const SlowMemory::Copy copy{block.start, source.data(), block.bytes};
  file.write({&copy, 1});
}

bool holds_its_numbers(FileResource& file, const Block& block) {
  const SlowMemory::Range range{block.start, block.bytes};
  file.fetch({&range, 1});
  return std::memcmp(block.start, numbers(block.seed, block.bytes).data(), block.bytes) == 0;
}

}  // namespace

TEST_CASE("file resource: random allocations keep their numbers and never overlap") {
  const kvpolicy::testing::TemporaryFolder folder;
  test::RecordingCalls calls;
  test::Random random{4};
  {
    FileResource file{
        {.folder = folder.path(), .max_bytes = 64 * MiB, .resident_bytes = MiB / 2, .slab_bytes = MiB / 4},
        calls};
    std::vector<Block> blocks;
    std::size_t live = 0;
    for (std::size_t i = 0; i < 600; ++i) {
      const std::size_t what = test::below(random, 8);
      if (what < 4 && blocks.size() < 150) {
        const std::size_t bytes =
            test::one_of(random, std::vector<std::size_t>{1, 63, 64, 65, 2304, 4096, 16384, 40000, 300000});
        const std::size_t alignment = test::one_of(random, std::vector<std::size_t>{1, 8, 64, 4096});
        const Block block{static_cast<std::byte*>(file.allocate(bytes, alignment)), bytes, alignment, i};
        REQUIRE(reinterpret_cast<std::uintptr_t>(block.start) % alignment == 0);
        REQUIRE(file.holds(block.start));
        REQUIRE(file.holds(block.start + bytes - 1));
        for (const Block& other : blocks) {
          REQUIRE((block.start + bytes <= other.start || other.start + other.bytes <= block.start));
        }
        write(file, block);
        blocks.push_back(block);
        live += bytes;
      } else if (what < 6 && !blocks.empty()) {
        const std::size_t one = test::below(random, blocks.size());
        const Block block = blocks[one];
        REQUIRE(holds_its_numbers(file, block));
        file.deallocate(block.start, block.bytes, block.alignment);
        blocks.erase(blocks.begin() + static_cast<std::ptrdiff_t>(one));
        live -= block.bytes;
      } else if (!blocks.empty()) {
        REQUIRE(holds_its_numbers(file, blocks[test::below(random, blocks.size())]));
      }
      CHECK(file.live_bytes() >= live);
      CHECK(file.live_bytes() <= file.file_bytes());
    }
    CHECK(std::filesystem::is_empty(folder.path()));  // the file has no name
    for (const Block& block : blocks) REQUIRE(holds_its_numbers(file, block));
    const std::size_t size = file.file_bytes();
    for (const Block& block : blocks) file.deallocate(block.start, block.bytes, block.alignment);
    CHECK(file.live_bytes() == 0);
    for (Block& block : blocks) {
      block.start = static_cast<std::byte*>(file.allocate(block.bytes, block.alignment));
    }
    CHECK(file.file_bytes() == size);  // freed memory is reused
    std::byte other{};
    CHECK_FALSE(file.holds(&other));
    CHECK_FALSE(file.holds(nullptr));
  }
  CHECK(calls.closed == 1);
}

TEST_CASE("file resource: what is in memory stays within the budget") {
  const kvpolicy::testing::TemporaryFolder folder;
  test::RecordingCalls calls;
  FileResource file{{.folder = folder.path(), .resident_bytes = 2 * MiB}, calls};
  std::vector<Block> blocks;
  for (std::size_t i = 0; i < 600; ++i) {
    blocks.push_back({static_cast<std::byte*>(file.allocate(16384, 64)), 16384, 64, i});
  }
  for (std::size_t first = 0; first < blocks.size(); first += 20) {
    std::vector<std::vector<std::byte>> sources;
    std::vector<SlowMemory::Copy> copies;
    for (std::size_t i = first; i < first + 20; ++i) {
      sources.push_back(numbers(i, 16384));
      copies.push_back({blocks[i].start, sources.back().data(), 16384});
    }
    file.write(copies);
    CHECK(file.resident_bytes() <= 2 * MiB);
  }
  CHECK(file.file_bytes() >= 9 * MiB);
  const bool measurable = !test::is_in_memory(folder.path());
  WARN_MESSAGE(measurable, "the temporary folder is in memory: residency is not measured");
  const auto in_memory = [&] {
    return measurable ? test::bytes_in_memory(calls.mapping, file.file_bytes()) : 0;
  };
  CHECK(in_memory() <= 2 * MiB);
  for (std::size_t round = 0; round < 2; ++round) {
    for (std::size_t first = 0; first + 60 <= blocks.size(); first += 60) {
      std::vector<SlowMemory::Range> ranges;
      for (std::size_t i = first; i < first + 60; ++i) ranges.emplace_back(blocks[i].start, blocks[i].bytes);
      file.fetch(ranges);
      CHECK(in_memory() <= 2 * MiB);
      if (measurable) CHECK(test::bytes_in_memory(blocks[first].start, 60 * 16384) == 60 * 16384);
    }
  }
  // More than the budget at once stays in memory only as long as it is needed.
  std::vector<SlowMemory::Range> all;
  for (const Block& block : blocks) all.emplace_back(block.start, block.bytes);
  file.fetch(all);
  CHECK(file.resident_bytes() >= 9 * MiB);
  file.fetch({all.data(), 1});
  CHECK(file.resident_bytes() <= 2 * MiB);
  CHECK(in_memory() <= 2 * MiB);
  for (const Block& block : blocks) REQUIRE(holds_its_numbers(file, block));
}

TEST_CASE("file resource: options and folders that do not work") {
  const kvpolicy::testing::TemporaryFolder folder;
  const auto make = [](FileOptions options) { const FileResource file{options}; };
  CHECK(contains(thrown<ConfigError>([&] { make({}); }), "folder is empty"));
  CHECK(
      contains(thrown<ConfigError>([&] { make({.folder = folder.path(), .slab_bytes = 0}); }), "slab_bytes"));
  CHECK(contains(thrown<ConfigError>([&] { make({.folder = folder.path(), .max_bytes = 100}); }),
                 "slab_bytes"));
  CHECK(contains(
      thrown<ConfigError>([&] { make({.folder = folder.path(), .max_bytes = std::size_t{1} << 60}); }),
      "max_bytes"));
  const std::string missing = folder.path() / "missing";
  const std::string text = thrown<StorageError>([&] { make({.folder = missing}); });
  CHECK(contains(text, missing));
  CHECK(contains(text, "No such file or directory"));
  CHECK(contains(text, "name another folder"));
  test::RecordingCalls calls;
  calls.errors["map"] = ENOMEM;
  CHECK(contains(thrown<StorageError>([&] { const FileResource file{{.folder = folder.path()}, calls}; }),
                 "lower max_bytes"));
  CHECK(calls.closed == 1);
  FileResource file{{.folder = folder.path()}};
  CHECK_THROWS_AS((void)file.allocate(64, 1 << 20), std::bad_alloc);
}

TEST_CASE("file resource: its own limit, the process's limit, and a full disk") {
  const kvpolicy::testing::TemporaryFolder folder;
  const auto fill = [](FileResource& file) {
    std::size_t blocks = 0;
    std::string text;
    do {
      text = thrown<StorageError>([&] {
        (void)file.allocate(16384, 64);
        ++blocks;
      });
    } while (text.empty() && blocks < 10000);
    return std::pair{blocks, text};
  };
  {
    FileResource file{{.folder = folder.path(), .max_bytes = MiB + 40000, .slab_bytes = MiB / 2}};
    const auto [blocks, text] = fill(file);
    CHECK(blocks == 64 + 2);  // the last, small slab included
    CHECK(contains(text, "raise max_bytes"));
    CHECK(contains(text, "no room for 16384 more bytes after 1081344"));
  }
  {  // Beyond this limit a process gets SIGXFSZ, which ends it by default.
    rlimit before{};
    REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
    const rlimit lowered{.rlim_cur = MiB + 100, .rlim_max = before.rlim_max};
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &lowered) == 0);
    FileResource file{{.folder = folder.path()}};
    const auto [blocks, text] = fill(file);
    REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
    CHECK(blocks == 64);
    CHECK(contains(text, "limit of file sizes"));
    CHECK(file.allocate(16384, 64) != nullptr);
  }
  {
    test::RecordingCalls calls;
    FileResource file{{.folder = folder.path()}, calls};
    const Block block{static_cast<std::byte*>(file.allocate(5000, 64)), 5000, 64, 3};
    write(file, block);
    calls.errors["allocate"] = ENOSPC;
    const auto text = thrown<StorageError>([&] { (void)file.allocate(16384, 64); });
    CHECK(contains(text, "No space left on device"));
    CHECK(contains(text, std::string{folder.path()}));
    CHECK(contains(text, "free space on the disk"));
    CHECK(holds_its_numbers(file, block));
    calls.errors.clear();
    CHECK(file.allocate(16384, 64) != nullptr);
  }
}

// The system itself reaches a limit: the calls below FileCalls are the real ones.
TEST_CASE("file resource: the system really refuses to grow a file") {
  const kvpolicy::testing::TemporaryFolder folder;
  test::RecordingCalls calls;
  calls.limit = 100 * MiB;  // so that the resource does not see the limit before
  FileResource file{{.folder = folder.path()}, calls};
  rlimit before{};
  REQUIRE(::getrlimit(RLIMIT_FSIZE, &before) == 0);
  const rlimit lowered{.rlim_cur = MiB, .rlim_max = before.rlim_max};
  auto* const handler = std::signal(SIGXFSZ, SIG_IGN);
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &lowered) == 0);
  std::string text;
  for (int i = 0; i < 200 && text.empty(); ++i) {
    text = thrown<StorageError>([&] { (void)file.allocate(16384, 64); });
  }
  REQUIRE(::setrlimit(RLIMIT_FSIZE, &before) == 0);
  std::signal(SIGXFSZ, handler);
  CHECK(contains(text, "File too large"));
  CHECK(file.file_bytes() == MiB);
  CHECK(file.allocate(16384, 64) != nullptr);
}

TEST_CASE("file resource: reads and writes that fail") {
  const kvpolicy::testing::TemporaryFolder folder;
  test::RecordingCalls calls;
  FileResource file{{.folder = folder.path(), .resident_bytes = MiB}, calls};
  const Block block{static_cast<std::byte*>(file.allocate(16384, 64)), 16384, 64, 3};
  for (const char* name : {"write", "sync"}) {
    calls.errors[name] = EIO;
    const auto text = thrown<StorageError>([&] { write(file, block); });
    CHECK(contains(text, "cannot write 16384 bytes at 0"));
    CHECK(contains(text, "Input/output error"));
    calls.errors.clear();
  }
  write(file, block);
  CHECK(holds_its_numbers(file, block));
  // `populate` fails without a reason; `read` reports it.
  calls.errors = {{"populate", EFAULT}, {"read", EIO}};
  const auto text = thrown<StorageError>([&] { (void)holds_its_numbers(file, block); });
  CHECK(contains(text, "cannot read 16384 bytes at 0"));
  CHECK(contains(text, "Input/output error"));
  // `populate` fails, and `read` does not, so the failure is ignored.
  calls.errors = {{"populate", EFAULT}};
  CHECK(contains(thrown<StorageError>([&] { (void)holds_its_numbers(file, block); }), "Bad address"));
  // A system without `populate`: `read` does its work.
  calls.errors = {{"populate", EINVAL}};
  const std::size_t reads = calls.counts["read"];
  CHECK(holds_its_numbers(file, block));
  CHECK(calls.counts["read"] == reads + 1);
  calls.errors = {{"populate", EINVAL}, {"read", EIO}};
  CHECK(contains(thrown<StorageError>([&] { (void)holds_its_numbers(file, block); }), "Input/output error"));
  calls.errors.clear();
  CHECK(holds_its_numbers(file, block));
}

TEST_CASE("file resource: behind a base class and a limit it is still slow memory") {
  const kvpolicy::testing::TemporaryFolder folder;
  test::RecordingCalls calls;
  FileResource file{{.folder = folder.path().string(), .max_bytes = 64 * MiB}, calls};
  LimitedMemory limited{2 * MiB, &file};
  std::pmr::memory_resource* const resources[] = {&file, &limited};
  const auto source = numbers(3, MiB);
  for (const TierMemory memory :
       {TierMemory{&file}, TierMemory{&limited}, TierMemory{resources[0]}, TierMemory{resources[1]}}) {
    PagePool pool{memory};
    CHECK(pool.provider(0) == memory.provider());
    const kvpolicy::PageId page = pool.allocate(MiB);
    CHECK(pool.provider(0)->holds(pool.address(page)));
    const SlowMemory::Copy copy{pool.address(page), source.data(), MiB};
    const SlowMemory::Range range{pool.address(page), MiB};
    calls.errors["write"] = ENOSPC;
    CHECK_THROWS_AS(pool.provider(0)->write({&copy, 1}), StorageError);
    calls.errors.clear();
    pool.provider(0)->write({&copy, 1});
    calls.errors = {{"populate", EFAULT}, {"read", EIO}};
    CHECK_THROWS_AS(pool.provider(0)->fetch({&range, 1}), StorageError);
    calls.errors.clear();
    pool.provider(0)->fetch({&range, 1});
    CHECK(std::memcmp(range.data(), source.data(), MiB) == 0);
    pool.release(page);
    CHECK(file.live_bytes() == 0);
  }
  CHECK(limited.live_bytes() == 0);
  CHECK(limited.peak_bytes() >= MiB);

  // Over other memory a limit is no slow memory, and pages are written all the same.
  LimitedMemory plain{2 * MiB};
  std::vector<std::byte> target(MiB);
  const SlowMemory::Copy copy{target.data(), source.data(), MiB};
  plain.write({&copy, 1});
  CHECK(target == source);
  CHECK(!plain.holds(target.data()));
}
