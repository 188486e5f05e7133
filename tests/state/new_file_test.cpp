// SPDX-License-Identifier: Apache-2.0
//
// What stays of a file that is replaced: its permissions, the links to it, and the file itself if the
// new one cannot be written.
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <string>
#include <string_view>

#include <kvpolicy/state/new_file.hpp>

#include "support/compare.hpp"
#include "support/small_cache.hpp"
#include "support/temporary_folder.hpp"

#if defined(__linux__)
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>
#endif

using kvpolicy::NewFile;
using kvpolicy::NewFileAccess;
using kvpolicy::StorageError;
using test::contains;
using test::thrown;
namespace fs = std::filesystem;

namespace {

std::string content(const fs::path& path) {
  std::ifstream in{path, std::ios::binary};
  return {std::istreambuf_iterator<char>{in}, {}};
}

std::size_t entries(const fs::path& folder) {
  return static_cast<std::size_t>(std::distance(fs::directory_iterator{folder}, fs::directory_iterator{}));
}

void replace(const fs::path& path, std::string_view text, NewFileAccess access = NewFileAccess::umask) {
  NewFile file{path, access};
  file.write(std::as_bytes(std::span{text}));
  file.replace();
}

}  // namespace

TEST_CASE("until it is replaced, the old file stays, and the new one leaves no trace") {
  const kvpolicy::testing::TemporaryFolder folder;
  const fs::path path = folder.path() / "file";
  replace(path, "old");
  {
    NewFile file{path};
    const std::string_view text = "new";
    file.write(std::as_bytes(std::span{text}));
    CHECK(entries(folder.path()) == 2);
  }
  CHECK(content(path) == "old");
  CHECK(entries(folder.path()) == 1);
  replace(path, "new");
  CHECK(content(path) == "new");
  CHECK(entries(folder.path()) == 1);
}

TEST_CASE("two writers of one file do not interfere: the last one to replace it wins, whole") {
  const kvpolicy::testing::TemporaryFolder folder;
  const fs::path path = folder.path() / "file";
  const auto bytes = [](std::string_view text) { return std::as_bytes(std::span{text}); };
  NewFile one{path};
  one.write(bytes("one, "));
  NewFile other{path};
  other.write(bytes("the other"));
  one.write(bytes("whole"));
  other.replace();
  CHECK(content(path) == "the other");
  one.replace();
  CHECK(content(path) == "one, whole");
  CHECK(entries(folder.path()) == 1);
}

#if defined(__linux__)
namespace {

unsigned mode_of(const fs::path& path) {
  struct stat status {};
  REQUIRE(::stat(path.c_str(), &status) == 0);
  return status.st_mode & 07777U;
}

}  // namespace

TEST_CASE("a file keeps its permissions; a new one has those of the umask, or of its owner only") {
  const kvpolicy::testing::TemporaryFolder folder;
  const mode_t before = ::umask(0027);
  replace(folder.path() / "shared", "x");
  replace(folder.path() / "own", "x", NewFileAccess::owner);
  CHECK(mode_of(folder.path() / "shared") == 0640);
  CHECK(mode_of(folder.path() / "own") == 0600);
  const fs::path path = folder.path() / "kept";
  std::ofstream{path} << "old";
  for (const unsigned mode : {0600U, 0644U, 0660U, 0777U, 0400U}) {
    for (const NewFileAccess access : {NewFileAccess::umask, NewFileAccess::owner}) {
      REQUIRE(::chmod(path.c_str(), mode) == 0);
      replace(path, "new", access);
      CHECK(mode_of(path) == mode);
    }
  }
  ::umask(before);
  // A prompt cache contains the prompt, so only its owner may read it.
  kvpolicy::save(test::small_cache(), folder.path() / "prompt.kvcache");
  CHECK(mode_of(folder.path() / "prompt.kvcache") == 0600);
  REQUIRE(::chmod((folder.path() / "prompt.kvcache").c_str(), 0644) == 0);
  kvpolicy::save(test::small_cache(), folder.path() / "prompt.kvcache");
  CHECK(mode_of(folder.path() / "prompt.kvcache") == 0644);
}

TEST_CASE("a link stays, and its target is replaced") {
  const kvpolicy::testing::TemporaryFolder folder;
  fs::create_directory(folder.path() / "far");
  const fs::path target = folder.path() / "far" / "file";
  replace(target, "old");
  fs::create_symlink("far/file", folder.path() / "relative");
  fs::create_symlink(target, folder.path() / "absolute");
  fs::create_symlink("relative", folder.path() / "twice");
  for (const std::string name : {"relative", "absolute", "twice"}) {
    CAPTURE(name);
    replace(folder.path() / name, name);
    CHECK(fs::is_symlink(folder.path() / name));
    CHECK(fs::is_regular_file(fs::symlink_status(target)));
    CHECK(content(target) == name);
  }
  CHECK(entries(folder.path()) == 4);
  CHECK(entries(folder.path() / "far") == 1);
  // A link to a file that does not exist yet creates it.
  fs::create_symlink("far/next", folder.path() / "dangling");
  replace(folder.path() / "dangling", "x");
  CHECK(fs::is_symlink(folder.path() / "dangling"));
  CHECK(content(folder.path() / "far" / "next") == "x");
}

TEST_CASE("links that form a cycle, pipes and folders are refused and stay") {
  const kvpolicy::testing::TemporaryFolder folder;
  fs::create_symlink("b", folder.path() / "a");
  fs::create_symlink("a", folder.path() / "b");
  CHECK(thrown<StorageError>([&] { replace(folder.path() / "a", "x"); }) ==
        (folder.path() / "a").string() + ": cannot be written: Too many levels of symbolic links");
  const fs::path pipe = folder.path() / "pipe";
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  fs::create_symlink(pipe, folder.path() / "to_pipe");
  for (const fs::path& path : {pipe, folder.path() / "to_pipe", folder.path()}) {
    CHECK(thrown<StorageError>([&] { replace(path, "x"); }) ==
          path.string() + ": is not a regular file, cannot be replaced by one");
  }
  CHECK(fs::is_fifo(pipe));
  CHECK(entries(folder.path()) == 4);
}

// A write beyond the limit of file size kills a process by a signal, unless it checks first.
TEST_CASE("at the limit of file size there is an error, and the process continues") {
  const kvpolicy::testing::TemporaryFolder folder;
  const fs::path path = folder.path() / "file";
  replace(path, "old");
  const pid_t child = ::fork();
  if (child == 0) {
    const rlimit limit{1000, 1000};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    int said = 0;
    try {
      replace(path, std::string(1000, 'x'));
      replace(path, std::string(1001, 'y'));
      said = 1;
    } catch (const StorageError& error) {
      said = error.what() == path.string() + ": cannot be written: File too large" ? 3 : 2;
    }
    ::_exit(said);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  REQUIRE(WIFEXITED(status));
  CHECK(WEXITSTATUS(status) == 3);
  CHECK(content(path) == std::string(1000, 'x'));
  CHECK(entries(folder.path()) == 1);
}
#endif
