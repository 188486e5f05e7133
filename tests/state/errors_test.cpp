// SPDX-License-Identifier: Apache-2.0
//
// What is refused, with which message, and that nothing changes then.
#include <doctest/doctest.h>

#include <cstddef>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <span>
#include <sstream>
#include <string>
#include <utility>

#include "cache/dump.hpp"
#include "support/small_cache.hpp"
#include "support/temporary_folder.hpp"

#if defined(__linux__)
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <csignal>
#endif

using kvpolicy::ConfigError;
using kvpolicy::FormatError;
using kvpolicy::StorageError;
using test::contains;
using test::SmallCache;
using test::thrown;
namespace fs = std::filesystem;

namespace {

std::string content(const fs::path& path) {
  std::ifstream in{path, std::ios::binary};
  return {std::istreambuf_iterator<char>{in}, {}};
}

std::size_t files_in(const fs::path& folder) {
  std::size_t files = 0;
  for ([[maybe_unused]] const auto& entry : fs::directory_iterator{folder}) ++files;
  return files;
}

// The message of loading these bytes into a cache of this plan.
template <class Plan>
std::string refusal(const Plan& plan, const std::string& bytes, std::string_view tag = {},
                    const kvpolicy::CacheOptions& options = test::small_options()) {
  kvpolicy::KvCache cache{plan, options};
  return thrown<FormatError>([&] { test::load_bytes(cache, bytes, tag); });
}

// A stream that accepts `most` bytes and then fails.
class ShortBuffer : public std::streambuf {
 public:
  explicit ShortBuffer(std::size_t most) : left_{most} {}

 private:
  int_type overflow(int_type) override { return traits_type::eof(); }
  std::streamsize xsputn(const char*, std::streamsize count) override {
    const auto taken = std::min(count, static_cast<std::streamsize>(left_));
    left_ -= static_cast<std::size_t>(taken);
    return taken;
  }
  std::size_t left_;
};

}  // namespace

TEST_CASE("what is no saved cache of this plan is refused, with the reason") {
  const std::string file = test::saved(test::small_cache());
  const auto plan = test::small_plan();
  CHECK(refusal(plan, file).empty());
  CHECK(refusal(plan, "") == "saved cache: is not a saved cache: its first 8 bytes must be \"kvpcache\"");
  CHECK(refusal(plan, "{\"plan\": 1, \"heads\": []}") ==
        "saved cache: is not a saved cache: its first 8 bytes must be \"kvpcache\"");
  CHECK(refusal(plan, file.substr(0, 11)) == "saved cache: is cut off after 11 bytes");
  CHECK(refusal(plan, file.substr(0, 2000)) == "saved cache: is cut off inside record 1");

  std::string other = file;
  std::swap(other[8], other[11]);
  std::swap(other[9], other[10]);
  CHECK(refusal(plan, other) == "saved cache: was written on a machine of the other byte order");
  other = file;
  other[12] = 2;
  CHECK(refusal(plan, other) == "saved cache: is of version 2, must be 1");

  auto changed = plan;
  changed.set(
      0, 6,
      kvpolicy::ChunkRetrievalCache<kvpolicy::DenseStorage<kvpolicy::float16>, kvpolicy::MinMaxKey>::Config{
          .chunk = 3, .budget = 9});
  CHECK(refusal(changed, file) ==
        "saved cache: KV head 6 of layer 0 is \"chunk_retrieval over dense (summary minmax)\" with "
        "other settings than in the plan, must have the same");
  changed = plan;
  changed.set(0, 3, kvpolicy::FullCache<kvpolicy::DenseStorage<kvpolicy::float16>>::Config{});
  CHECK(refusal(changed, file) ==
        "saved cache: KV head 3 of layer 0 is \"head_budget over dense\", must be \"full over "
        "dense\"");
  CHECK(refusal(kvpolicy::HeadPlan<kvpolicy::bfloat16>{test::small_shape}, file) ==
        "saved cache: holds rows in \"float16\", must be bfloat16");
  CHECK(refusal(test::SmallPlan{{1, 18, 9, 64}}, file) ==
        "saved cache: is of a model of 1 layers, 9 query heads, 9 KV heads of 64, must be 1 layers, "
        "18 query heads, 9 KV heads of 64");

  auto options = test::small_options();
  options.max_tokens = 10;
  SmallCache small{plan, options};
  CHECK(thrown<kvpolicy::CapacityError>([&] { test::load_bytes(small, file); }) ==
        "saved cache: holds 11 tokens, max_tokens is 10");
  options = {.max_rollback = 0, .max_append = 1, .page_rows = 16};
  SmallCache without_tail{plan, options};
  CHECK(contains(thrown<kvpolicy::CapacityError>([&] { test::load_bytes(without_tail, file); }),
                 "layer 0 has 2 rows that can be taken back, the cache has room for max_rollback + "
                 "max_append = 1"));
  auto committed = test::small_cache();
  committed.commit();
  test::load_bytes(without_tail, test::saved(committed));
  CHECK(without_tail.commit_point() == 11);
}

TEST_CASE("a plan over fewer policies loads what a plan over all saved, if its heads are the same") {
  using Full = kvpolicy::FullCache<kvpolicy::DenseStorage<kvpolicy::float16>>;
  const kvpolicy::ModelShape shape{1, 2, 2, 64};
  SmallCache wide{test::SmallPlan{shape}};
  test::small_step(wide, 20);
  SmallCache narrow{kvpolicy::HeadPlan<Full>{shape}};
  test::load_bytes(narrow, test::saved(wide));
  CHECK(test::dump(narrow) == test::dump(wide));
  CHECK(test::small_step(narrow, 1) == test::small_step(wide, 1));
}

TEST_CASE("a tag distinguishes caches that differ only in their text") {
  const std::string file = test::saved(test::small_cache(), "model 7, prompt 3");
  CHECK(refusal(test::small_plan(), file, "model 7, prompt 3").empty());
  CHECK(refusal(test::small_plan(), file, "model 7, prompt 4") ==
        "saved cache: has the tag \"model 7, prompt 3\", must be \"model 7, prompt 4\"");
  CHECK(refusal(test::small_plan(), file) == "saved cache: has the tag \"model 7, prompt 3\", must be \"\"");
  const std::string long_tag(kvpolicy::max_tag_bytes, '\n');
  CHECK(refusal(test::small_plan(), test::saved(test::small_cache(), long_tag), long_tag).empty());
  CHECK(thrown<ConfigError>([&] { (void)test::saved(test::small_cache(), long_tag + "x"); }) ==
        "save: the tag has 65537 bytes, must have at most 65536");
}

TEST_CASE("a cache cannot be saved between the layers of a step or while a tree is pending") {
  kvpolicy::KvCache<float> cache{kvpolicy::HeadPlan<float>{{2, 1, 1, 64}}, {.max_rollback = 4}};
  test::Random random{1};
  test::Chunk chunk{random, cache.plan().shape(), 3};
  chunk.step(cache, 0);
  CHECK(thrown<kvpolicy::RollbackError>([&] { (void)test::saved(cache); }) ==
        "save: layer 0 holds 3 tokens, another one 0; save between two steps, or truncate first");
  chunk.step(cache, 1);
  (void)test::saved(cache);
  kvpolicy::TokenTree tree;
  tree.add(kvpolicy::TokenTree::text);
  tree.add(kvpolicy::TokenTree::text);
  test::Chunk nodes{random, cache.plan().shape(), 2};
  for (const std::size_t layer : {std::size_t{0}, std::size_t{1}}) nodes.step(cache, layer, {.tree = &tree});
  CHECK(contains(thrown<kvpolicy::RollbackError>([&] { (void)test::saved(cache); }),
                 "save: a tree of 2 nodes waits"));
}

TEST_CASE("a file replaces the one before, and must contain nothing else") {
  const kvpolicy::testing::TemporaryFolder folder;
  const fs::path path = folder.path() / "prompt.kvcache";
  SmallCache cache{test::small_plan(), test::small_options()};
  CHECK(thrown<StorageError>([&] { kvpolicy::load(cache, path); }) ==
        path.string() + ": there is no such file");
  kvpolicy::save(test::small_cache(), path, "a");
  CHECK(files_in(folder.path()) == 1);
  CHECK(content(path) == test::saved(test::small_cache(), "a"));
  kvpolicy::load(cache, path, "a");
  test::small_step(cache, 30);
  kvpolicy::save(cache, path, "b");
  CHECK(content(path) == test::saved(cache, "b"));
  CHECK(files_in(folder.path()) == 1);
  std::ofstream{path, std::ios::app} << 'x';
  CHECK(thrown<FormatError>([&] { kvpolicy::load(cache, path, "b"); }) ==
        path.string() + ": continues after its last record");
  CHECK(thrown<StorageError>([&] { kvpolicy::save(cache, folder.path()); }) ==
        folder.path().string() + ": is not a regular file, cannot be replaced by one");
  CHECK(thrown<StorageError>([&] { kvpolicy::load(cache, folder.path()); }) ==
        folder.path().string() + ": is a folder");
#if defined(__linux__)
  const fs::path pipe = folder.path() / "pipe";  // opening it would wait for a writer
  REQUIRE(::mkfifo(pipe.c_str(), 0600) == 0);
  CHECK(contains(thrown<StorageError>([&] { kvpolicy::load(cache, pipe); }),
                 pipe.string() + ": is not a regular file"));
  const fs::path loop = folder.path() / "loop";
  fs::create_symlink(loop, loop);
  CHECK(thrown<StorageError>([&] { kvpolicy::load(cache, loop); }) ==
        loop.string() + ": cannot be read: Too many levels of symbolic links");
#endif
  const fs::path nowhere = folder.path() / "no" / "such";
  CHECK(contains(thrown<StorageError>([&] { kvpolicy::save(cache, nowhere); }),
                 nowhere.string() + ": cannot be written"));
}

TEST_CASE("several caches in one stream") {
  std::stringstream stream;
  const auto one = test::small_cache();
  auto other = test::small_cache();
  test::small_step(other, 5);
  kvpolicy::save(one, stream, "one");
  kvpolicy::save(other, stream, "other");
  SmallCache cache{test::small_plan(), test::small_options()};
  kvpolicy::load(cache, stream, "one");
  CHECK(test::dump(cache) == test::dump(one));
  kvpolicy::load(cache, stream, "other");
  CHECK(test::dump(cache) == test::dump(other));
}

TEST_CASE("a stream that accepts only a part is an error wherever it ends") {
  const auto cache = test::small_cache();
  const std::size_t size = test::saved(cache).size();
  for (std::size_t most = 0; most < size; most += 1009) {
    ShortBuffer buffer{most};
    std::ostream stream{&buffer};
    CHECK(thrown<StorageError>([&] {
            kvpolicy::save(cache, stream);
          }).starts_with("saved cache: the stream does not take "));
  }
  ShortBuffer buffer{size};
  std::ostream stream{&buffer};
  kvpolicy::save(cache, stream);
}

#if defined(__linux__)
TEST_CASE("a full device is an error") {
  std::ofstream full{"/dev/full", std::ios::binary};
  if (!full.good()) return;
  CHECK(contains(thrown<StorageError>([&] { kvpolicy::save(test::small_cache(), full); }),
                 "the stream does not take"));
  CHECK(thrown<StorageError>([&] { kvpolicy::save(test::small_cache(), fs::path{"/dev/full"}); }) ==
        "/dev/full: is not a regular file, cannot be replaced by one");
}

template <class F>
int in_child(F run) {
  const pid_t child = ::fork();
  if (child == 0) ::_exit(run());
  int status = 0;
  ::waitpid(child, &status, 0);
  return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
}

// Saves in a child process that may write so many bytes to a file.
int save_limited(const SmallCache& cache, const fs::path& path, std::size_t max_bytes) {
  return in_child([&] {
    const rlimit limit{max_bytes, max_bytes};
    ::setrlimit(RLIMIT_FSIZE, &limit);
    try {
      kvpolicy::save(cache, path);
      return 0;
    } catch (const StorageError& error) {
      return contains(error.what(), "cannot be written: File too large") ? 3 : 4;
    }
  });
}

// Kills a child process after it has written so many bytes.
int die_while_saving(const std::string& bytes, const fs::path& path, std::size_t written) {
  return in_child([&] {
    kvpolicy::NewFile file{path};
    file.write(std::as_bytes(std::span{bytes}.first(written)));
    return ::raise(SIGKILL);
  });
}

TEST_CASE("a full disk and a process that dies while writing leave the old file") {
  const kvpolicy::testing::TemporaryFolder folder;
  const fs::path path = folder.path() / "prompt.kvcache";
  const auto old = test::small_cache();
  kvpolicy::save(old, path);
  const std::string before = content(path);
  auto longer = test::small_cache();
  test::small_step(longer, 100);
  const std::size_t size = test::saved(longer).size();
  for (const std::size_t most : {std::size_t{0}, size / 2, size - 1}) {
    CHECK(save_limited(longer, path, most) == 3);
    CHECK(content(path) == before);
    CHECK(files_in(folder.path()) == 1);
  }
  for (const std::size_t most : {std::size_t{0}, size / 2, size - 1}) {
    CHECK(die_while_saving(test::saved(longer), path, most) == -SIGKILL);
    CHECK(content(path) == before);
  }
  CHECK(files_in(folder.path()) == 4);  // the rest of three crashes
  SmallCache cache{test::small_plan(), test::small_options()};
  kvpolicy::load(cache, path);
  CHECK(test::dump(cache) == test::dump(old));
  CHECK(save_limited(longer, path, size) == 0);
  CHECK(content(path) == test::saved(longer));
}
#endif
