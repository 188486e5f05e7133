// SPDX-License-Identifier: Apache-2.0
//
// Prefixes that survive the end of a program.
#include <doctest/doctest.h>

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <new>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include <kvpolicy/cache/saved_prefixes.hpp>

#include "cache/prefix_texts.hpp"
#include "state/twins.hpp"
#include "support/memory.hpp"
#include "support/temporary_folder.hpp"

using namespace kvpolicy;
using test::contains;
using test::thrown;

namespace {

using Tokens = std::vector<std::int32_t>;
using Prefixes = PrefixCache<float>;

struct Summary {
  std::vector<std::vector<std::size_t>> prefixes;  // tokens, parent, bytes
  friend bool operator==(const Summary&, const Summary&) = default;
};

Summary summary(const Prefixes& prefixes) {
  Summary all;
  for (const PrefixInfo& one : prefixes.list()) {
    all.prefixes.push_back({one.tokens, one.parent, one.bytes});
  }
  return all;
}

std::filesystem::path only_file(const std::filesystem::path& folder) {
  std::filesystem::path found;
  std::size_t count = 0;
  for (const auto& entry : std::filesystem::directory_iterator{folder}) {
    found = entry.path();
    ++count;
  }
  REQUIRE(count == 1);
  return found;
}
std::string contents(const std::filesystem::path& path) {
  std::ifstream file{path, std::ios::binary};
  return {std::istreambuf_iterator<char>{file}, {}};
}
void write(const std::filesystem::path& path, const std::string& bytes) {
  std::ofstream{path, std::ios::binary} << bytes;
}

}  // namespace

TEST_CASE("prefixes are saved and loaded with their rows, their order of use and the pages that they share") {
  for (std::uint64_t seed = 0; seed < 4; ++seed) {
    CAPTURE(seed);
    const testing::TemporaryFolder folder;
    const ModelShape shape{1 + seed % 2, 8, 8, 64};
    testing::Random random{static_cast<unsigned>(seed)};
    const CacheOptions options{.max_rollback = seed == 3 ? std::size_t{4} : 0, .page_rows = 32};
    const auto plan = seed == 0 ? HeadPlan<float>{shape}
                                : test::random_saved_plan<float>(shape, random, options.max_rollback > 0);
    test::RandomPrefixes<float> saved{seed, {plan}, options, 150};
    saved.run(40);
    const std::size_t count = saved.prefixes().statistics().prefixes;
    REQUIRE(count > 0);
    CHECK(save(saved.prefixes(), folder.path(), "a tag") == count);

    test::RandomPrefixes<float> loaded{seed + 100, {plan}, options, 150};
    CHECK(load(loaded.prefixes(), plan, folder.path(), "a tag") == count);
    CHECK(summary(loaded.prefixes()) == summary(saved.prefixes()));
    CHECK(loaded.prefixes().statistics().bytes == saved.prefixes().statistics().bytes);
    CHECK(load(loaded.prefixes(), plan, folder.path(), "a tag") == 0);
    // The least recently used go first here and there.
    CHECK(saved.prefixes().evict(1) == loaded.prefixes().evict(1));
    CHECK(summary(loaded.prefixes()) == summary(saved.prefixes()));
    // Both are in the same state, so texts go on from a loaded prefix as they do from the others.
    loaded.run(20);
  }
}

TEST_CASE("a text that goes on from a loaded prefix says what it would have said") {
  const testing::TemporaryFolder folder;
  const ModelShape shape{1, 8, 8, 64};
  testing::Random random{9};
  const auto plan = test::random_saved_plan<float>(shape, random, false);
  test::Text text;
  while (text.size() < 150) text.add(static_cast<std::int32_t>(text.size()) % 7);
  KvCache<float> cold{plan};
  std::vector<float> expected;
  {
    Prefixes prefixes;
    expected = test::read_text(cold, text, 0, 150, 120, [&](std::size_t tokens) {
      if (tokens < 120) static_cast<void>(prefixes.keep(cold, text.tokens().first(tokens)));
    });
    CHECK(save(prefixes, folder.path()) > 1);
  }
  Prefixes prefixes;
  CHECK(load(prefixes, plan, folder.path()) > 1);
  auto found = prefixes.find(plan, text.tokens());
  REQUIRE(found);
  const auto nothing = [](std::size_t) {};
  CHECK(test::same_bits(test::read_text(found->cache, text, found->tokens, 150, 120, nothing), expected));
  CHECK(test::dump(found->cache) == test::dump(cold));
}

TEST_CASE("another plan, tag or page size is refused, and so is damage") {
  const testing::TemporaryFolder folder;
  const ModelShape shape{1, 2, 2, 16};
  const HeadPlan<float> plan{shape};
  const CacheOptions options{.page_rows = 16};
  Prefixes prefixes{options};
  test::Text text;
  while (text.size() < 40) text.add(1);
  KvCache<float> cache{plan, options};
  static_cast<void>(test::read_text(cache, text, 0, 20, 20, [](std::size_t) {}));
  CHECK(prefixes.keep(cache, text.tokens().first(20)));
  static_cast<void>(test::read_text(cache, text, 20, 40, 40, [](std::size_t) {}));
  CHECK(prefixes.keep(cache, text.tokens()));
  CHECK(save(prefixes, folder.path(), "model") == 2);
  const std::filesystem::path path = only_file(folder.path());

  const auto refused = [&](const HeadPlan<float>& other, const CacheOptions& with, std::string_view tag,
                           const std::string& part) {
    Prefixes loaded{with};
    const std::string message =
        thrown<FormatError>([&] { static_cast<void>(load(loaded, other, folder.path(), tag)); });
    CAPTURE(message);
    CHECK(contains(message, part));
    CHECK(loaded.statistics().prefixes == 0);
  };
  refused(plan, options, "other model", "has the tag \"prefixes: model\", must be \"prefixes: other model\"");
  refused(plan, {.page_rows = 32}, "model", "has pages of 16 rows, must have pages of 32");
  Prefixes small{{.max_tokens = 30, .page_rows = 16}};
  CHECK(contains(thrown<CapacityError>([&] { static_cast<void>(load(small, plan, folder.path(), "model")); }),
                 "holds 40 tokens, max_tokens is 30"));
  CHECK(small.statistics().prefixes == 0);

  // A plan has a file of its own, so another plan's file is not found; one that was renamed is refused.
  HeadPlan<float> other = plan;
  other.set(0, 1, SinkRecentCache<DenseStorage<float>>::Config{.sinks = 1, .recent = 8});
  Prefixes loaded{options};
  CHECK(load(loaded, other, folder.path(), "model") == 0);
  CHECK(load(loaded, plan, folder.path() / "nowhere", "model") == 0);
  Prefixes of_other{options};
  CHECK(of_other.keep(
      [&] {
        KvCache<float> one{other, options};
        static_cast<void>(test::read_text(one, text, 0, 20, 20, [](std::size_t) {}));
        return one;
      }(),
      text.tokens().first(20)));
  const testing::TemporaryFolder other_folder;
  CHECK(save(of_other, other_folder.path(), "model") == 1);
  std::filesystem::copy_file(path, only_file(other_folder.path()),
                             std::filesystem::copy_options::overwrite_existing);
  CHECK(contains(
      thrown<FormatError>([&] { static_cast<void>(load(loaded, other, other_folder.path(), "model")); }),
      "KV head 1 of layer 0 is"));

  const std::string file = contents(path);
  std::size_t tried = 0;
  const auto damaged = [&](const std::string& bytes) {
    write(path, bytes);
    Prefixes none{options};
    CHECK_THROWS_AS(static_cast<void>(load(none, plan, folder.path(), "model")), FormatError);
    CHECK(none.statistics().prefixes == 0);
    ++tried;
  };
  for (std::size_t size = 0; size < file.size(); size += 1 + size / 50) damaged(file.substr(0, size));
  for (std::size_t at = 0; at < file.size(); at += 1 + at / 50) {
    std::string other_bytes = file;
    other_bytes[at] = static_cast<char>(other_bytes[at] ^ (1 << at % 8));
    damaged(other_bytes);
  }
  damaged(file + "x");
  CHECK(tried > 200);
  write(path, file);
  CHECK(load(loaded, plan, folder.path(), "model") == 2);
}

TEST_CASE("a save that fails or was cut short leaves the old file") {
  const testing::TemporaryFolder folder;
  const HeadPlan<float> plan{ModelShape{1, 2, 2, 16}};
  Prefixes prefixes;
  test::Text text;
  while (text.size() < 20) text.add(1);
  KvCache<float> cache{plan};
  static_cast<void>(test::read_text(cache, text, 0, 20, 20, [](std::size_t) {}));
  CHECK(prefixes.keep(cache, text.tokens()));
  CHECK(save(prefixes, folder.path()) == 1);
  const std::filesystem::path path = only_file(folder.path());
  const std::string before = contents(path);
  // What a crash leaves over is none of the files that are read.
  write(path.string() + ".partial-1", before.substr(0, 50));
  Prefixes loaded;
  CHECK(load(loaded, plan, folder.path()) == 1);
  CHECK(contains(thrown<StorageError>([&] { static_cast<void>(save(prefixes, path)); }), "is not a folder"));
  CHECK(contents(path) == before);
}

TEST_CASE("what is saved has no byte of what the memory held before") {
  for (std::uint64_t seed = 0; seed < 8; ++seed) {
    CAPTURE(seed);
    const ModelShape shape{1 + seed % 2, 8, 8, 64};
    testing::Random random{static_cast<unsigned>(seed)};
    const std::size_t max_rollback = seed % 2 == 0 ? 0 : 4;
    const auto plan = test::random_saved_plan<float>(shape, random, max_rollback > 0);
    test::Text text;
    while (text.size() < 150) text.add(static_cast<std::int32_t>(text.size()) % 7);
    std::vector<std::string> saved;
    for (const std::byte fill : {std::byte{0xA5}, std::byte{0x3C}}) {
      test::CountingResource memory{fill};
      const CacheOptions options{.max_rollback = max_rollback, .page_rows = 32, .memory = &memory};
      Prefixes prefixes{options};
      KvCache<float> cache{plan, options};
      static_cast<void>(test::read_text(cache, text, 0, 150, 120, [&](std::size_t tokens) {
        if (tokens < 120) static_cast<void>(prefixes.keep(cache, text.tokens().first(tokens)));
      }));
      CHECK(prefixes.statistics().prefixes > 0);
      std::ostringstream stream;
      CHECK(save(prefixes, plan, stream) == prefixes.statistics().prefixes);
      save(cache, stream);
      saved.push_back(stream.str());
    }
    CHECK(saved[0] == saved[1]);
  }
}

TEST_CASE(
    "a file that cannot be written keeps no other plan's from being written, and a link is not followed") {
  const testing::TemporaryFolder folder;
  const ModelShape shape{1, 2, 2, 16};
  std::vector<HeadPlan<float>> plans(3, HeadPlan<float>{shape});
  for (std::size_t i = 0; i < plans.size(); ++i)
    plans[i].set(0, 0, SinkRecentCache<DenseStorage<float>>::Config{.sinks = i, .recent = 30});
  const CacheOptions options{.page_rows = 16};
  Prefixes prefixes{options};
  test::Text text;
  while (text.size() < 40) text.add(1);
  for (const HeadPlan<float>& plan : plans) {
    KvCache<float> cache{plan, options};
    static_cast<void>(test::read_text(cache, text, 0, 40, 40, [](std::size_t) {}));
    CHECK(prefixes.keep(cache, text.tokens()));
  }
  const auto path = [&](std::size_t i) { return saved_prefixes_path(plans[i], folder.path()); };
  std::filesystem::create_directory(path(0));
  write(folder.path() / "elsewhere", "of somebody else");
  std::filesystem::create_symlink(folder.path() / "elsewhere", path(1));
  CHECK(contains(thrown<StorageError>([&] { static_cast<void>(save(prefixes, folder.path())); }),
                 path(0).string() + ": is not a regular file"));
  CHECK(contents(folder.path() / "elsewhere") == "of somebody else");
  CHECK(!std::filesystem::is_symlink(path(1)));
  for (const std::size_t i : {1U, 2U}) {
    Prefixes loaded{options};
    CHECK(load(loaded, plans[i], folder.path()) == 1);
  }
  std::filesystem::remove(path(0));
  CHECK(save(prefixes, folder.path()) == 3);
}

TEST_CASE("prefixes are loaded all or, without memory, none") {
  const ModelShape shape{2, 2, 2, 16};
  const HeadPlan<float> plan{shape};
  std::stringstream stream;
  test::Text text;
  while (text.size() < 100) text.add(static_cast<std::int32_t>(text.size()) % 7);
  test::CountingResource memory;
  const CacheOptions options{.max_rollback = 4, .page_rows = 16, .memory = &memory};
  {
    Prefixes prefixes{options};
    KvCache<float> cache{plan, options};
    static_cast<void>(test::read_text(cache, text, 0, 100, 100, [&](std::size_t tokens) {
      static_cast<void>(prefixes.keep(cache, text.tokens().first(tokens)));
    }));
    REQUIRE(save(prefixes, plan, stream) > 2);
  }
  const std::size_t before = memory.allocations();
  {
    Prefixes prefixes{options};
    static_cast<void>(load(prefixes, plan, stream));
  }
  const std::size_t needed = memory.allocations() - before;
  REQUIRE(needed > 10);
  for (std::size_t successes = 0; successes < needed; ++successes) {
    CAPTURE(successes);
    stream.clear();
    stream.seekg(0);
    Prefixes prefixes{options};
    memory.fail_after(successes);
    CHECK_THROWS_AS(static_cast<void>(load(prefixes, plan, stream)), std::bad_alloc);
    CHECK(prefixes.statistics().prefixes == 0);
    CHECK(prefixes.statistics().kept == 0);
    CHECK(prefixes.statistics().evicted == 0);
    CHECK(prefixes.statistics().bytes == 0);
    CHECK(memory.live_bytes() == 0);
    memory.fail_after(test::never);
  }
}
