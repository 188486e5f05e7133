// SPDX-License-Identifier: Apache-2.0
//
// Reading and writing whole files and streams.
#include <algorithm>
#include <atomic>
#include <cstddef>
#include <filesystem>
#include <istream>
#include <sstream>
#include <streambuf>
#include <string>
#include <thread>
#include <vector>

#include <doctest/doctest.h>

#include <kvpolicy/io/text_file.hpp>

#include "says.hpp"
#include "support/compare.hpp"
#include "support/temporary_folder.hpp"

#if defined(__linux__)
#include <sys/stat.h>
#include <sys/sysmacros.h>
#endif

using namespace kvpolicy;
using namespace kvpolicy::testing;
using ::test::thrown;
namespace fs = std::filesystem;

namespace {

/// A stream that never ends and counts the bytes that are read.
class Endless : public std::streambuf {
 public:
  [[nodiscard]] std::size_t given() const { return given_; }

 private:
  std::streamsize xsgetn(char* out, std::streamsize count) override {
    std::fill_n(out, count, '\0');
    given_ += static_cast<std::size_t>(count);
    return count;
  }
  int_type underflow() override { return 0; }
  std::size_t given_ = 0;
};

}  // namespace

TEST_CASE("writers of one file each write a whole file and leave nothing else") {
  const TemporaryFolder folder;
  const fs::path path = folder.path() / "plan.json";
  constexpr std::size_t size = 300'000;
  io::write_text_file(path, std::string(size, 'a'));
  std::atomic<int> writing{2};
  std::atomic<int> failed{0};
  std::vector<std::thread> writers;
  for (const char letter : {'b', 'c'}) {
    writers.emplace_back([&, letter] {
      for (int i = 0; i < 100; ++i) {
        try {
          io::write_text_file(path, std::string(size, letter));
        } catch (const Error&) {
          ++failed;
        }
      }
      --writing;
    });
  }
  std::size_t mixed = 0;
  while (writing > 0) {
    try {
      const std::string text = io::read_text_file(path);
      mixed += text == std::string(size, text.front()) ? 0 : 1;
    } catch (const Error&) {  // the file was replaced while it was read
      ++mixed;
    }
  }
  for (std::thread& writer : writers) writer.join();
  CHECK(mixed == 0);
  CHECK(failed.load() == 0);
  CHECK(std::distance(fs::directory_iterator{folder.path()}, fs::directory_iterator{}) == 1);
}

TEST_CASE("a stream is read to its end, and not beyond its limit") {
  std::istringstream none{""};
  CHECK(io::read_text_stream(none, "stdin").empty());
  for (const std::size_t size : {1UL, 65535UL, 65536UL, 65537UL, 200'000UL}) {
    const std::string text(size, 'x');
    std::istringstream stream{text};
    const bool same = io::read_text_stream(stream, "stdin", size) == text;
    CHECK(same);
    std::istringstream again{text};
    CHECK(thrown<FormatError>([&] { (void)io::read_text_stream(again, "stdin", size - 1); }) ==
          message("stdin: has more than ", size - 1, " bytes"));
  }
  Endless endless;
  std::istream stream{&endless};
  CHECK(thrown<FormatError>([&] { (void)io::read_text_stream(stream, "stdin", 1'000'000); }) ==
        "stdin: has more than 1000000 bytes");
  CHECK(endless.given() == 1'000'001);
}

#if defined(__linux__)
TEST_CASE("what is not a file is neither read nor replaced") {
  const TemporaryFolder folder;
  const fs::path pipe = folder.path() / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(thrown<FormatError>([&] { (void)io::read_text_file(pipe); }) == Says{"pipe: is not a regular file"});
  CHECK(thrown<StorageError>([&] { io::write_text_file(pipe, "x"); }) ==
        Says{"pipe: is not a regular file, cannot be replaced by one"});
  CHECK(fs::is_fifo(pipe));
  // The test makes a device of its own, which needs root, so that it does not try the machine's
  // devices.
  const fs::path full = folder.path() / "full";
  if (::mknod(full.c_str(), S_IFCHR | 0600, ::makedev(1, 7)) == 0) {
    CHECK(thrown<StorageError>([&] { io::write_text_file(full, "x"); }) ==
          full.string() + ": is not a regular file, cannot be replaced by one");
    CHECK(fs::is_character_file(full));
  }

  const fs::path loop = folder.path() / "loop";
  fs::create_symlink(loop, loop);
  CHECK(thrown<FormatError>([&] { (void)io::read_text_file(loop); }) ==
        Says{"loop: cannot be read: Too many levels of symbolic links"});
  CHECK(thrown<StorageError>([&] { io::write_text_file(loop, "x"); }) ==
        Says{"loop: cannot be written: Too many levels of symbolic links"});
  CHECK(fs::is_symlink(loop));
}
#endif
