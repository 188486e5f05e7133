// SPDX-License-Identifier: Apache-2.0
//
// A user's own policy and storage are saved like those of the library.
#include <doctest/doctest.h>

#include <cstddef>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "cache/dump.hpp"
#include "support/small_cache.hpp"

namespace user {

using kvpolicy::Segment;

// A policy that keeps the rows at even positions, in its own vector.
class EvenRows {
 public:
  using element_type = float;
  struct Config {
    std::size_t every = 2;
    friend bool operator==(const Config&, const Config&) = default;
    void fields(kvpolicy::FieldVisitor& visit) { visit("every", every); }
    using policy_type = EvenRows;
  };
  static constexpr std::string_view name = "even_rows";

  EvenRows(const Config& config, const kvpolicy::StorageContext& context)
      : config_{config}, head_dim_{context.head_dim} {}
  void reserve(std::size_t) {}
  void release_unused() noexcept {}
  void commit(const Segment& rows) noexcept {
    for (std::size_t i = 0; i < rows.rows; ++i) {
      if (static_cast<std::size_t>(rows.position_of(i)) % config_.every != 0) continue;
      positions_.push_back(rows.position_of(i));
      for (const auto* side : {&rows.keys, &rows.values}) {
        auto& numbers = side == &rows.keys ? keys_ : values_;
        numbers.resize(numbers.size() + head_dim_);
        kvpolicy::load_row(*side, i, std::span{numbers}.last(head_dim_));
      }
    }
  }
  void segments(const kvpolicy::ReadRequest&, kvpolicy::SegmentList& out) const {
    Segment all = kvpolicy::rows_of(keys_.data(), values_.data(), positions_.size(), head_dim_, 0);
    all.positions = positions_.data();
    out.push_back(all);
  }
  [[nodiscard]] std::size_t rows() const { return positions_.size(); }
  [[nodiscard]] std::size_t bytes() const { return 2 * keys_.size() * sizeof(float); }
  [[nodiscard]] std::size_t shared_bytes() const { return 0; }

  template <class Archive>
  void serialize(Archive& archive) {
    archive(positions_, keys_, values_);
    archive.check(keys_.size() == rows() * head_dim_ && values_.size() == keys_.size(),
                  "a key and a value for each position");
    for (const std::int64_t position : positions_) {
      archive.check(position >= 0 && static_cast<std::size_t>(position) % config_.every == 0,
                    "rows at positions of every ", config_.every, ", not at ", position);
    }
  }

 private:
  Config config_;
  std::size_t head_dim_;
  std::vector<std::int64_t> positions_;
  std::vector<float> keys_, values_;
};

// The same rows, without a function to save them.
class Unsaved : public kvpolicy::FullCache<kvpolicy::DenseStorage<float>> {
 public:
  using FullCache::FullCache;
  void serialize() {}  // does not take an archive
};

}  // namespace user

TEST_CASE("a user's policy is saved and loaded by its own function") {
  kvpolicy::HeadPlan<float> plan{{1, 2, 2, 64}};
  plan.set(0, 1, user::EvenRows::Config{.every = 3});
  kvpolicy::KvCache<float> cache{plan, {.max_rollback = 2}};
  for (const std::size_t tokens : {std::size_t{20}, std::size_t{1}}) test::small_step(cache, tokens);
  kvpolicy::KvCache<float> loaded{plan, {.max_rollback = 2}};
  test::load_bytes(loaded, test::saved(cache));
  CHECK(test::dump(loaded) == test::dump(cache));
  CHECK(test::same_bits(test::small_step(loaded, 3), test::small_step(cache, 3)));

  plan.set(0, 1, user::EvenRows::Config{.every = 4});
  kvpolicy::KvCache<float> other{plan, {.max_rollback = 2}};
  CHECK(test::contains(
      test::thrown<kvpolicy::FormatError>([&] { test::load_bytes(other, test::saved(cache)); }),
      "KV head 1 of layer 0 is \"even_rows over dense\" with other settings"));
}

TEST_CASE("if a policy's own check fails, the error names the head") {
  kvpolicy::KvCache cache{kvpolicy::uniform_plan<user::EvenRows>({1, 1, 1, 64})};
  test::small_step(cache, 3);
  std::string file = test::saved(cache);
  // The two positions, 0 and 2, follow their number.
  const std::size_t at = file.find(std::string("\2\0\0\0\0\0\0\0\0\0\0\0\0\0\0\0\2", 17));
  REQUIRE(at != std::string::npos);
  file[at + 16] = 5;
  CHECK(test::thrown<kvpolicy::FormatError>([&] { test::load_bytes(cache, test::with_checksums(file)); }) ==
        "saved cache: KV head 0 of layer 0 is not as a cache saves it: must be rows at positions of "
        "every 2, not at 5");
}

TEST_CASE("a policy without a function to save it works in a cache, and saving is refused by name") {
  const auto plan = kvpolicy::uniform_plan<user::Unsaved>({1, 1, 1, 64});
  kvpolicy::KvCache cache{plan};
  test::small_step(cache, 3);
  const auto before = test::dump(cache);
  CHECK(test::contains(test::thrown<kvpolicy::ConfigError>([&] { (void)test::saved(cache); }),
                       "to be, a policy needs a `name`"));
  kvpolicy::KvCache full{kvpolicy::HeadPlan<float>{plan.shape()}};
  test::small_step(full, 2);
  const std::string file = test::saved(full);
  CHECK(test::contains(test::thrown<kvpolicy::ConfigError>([&] { test::load_bytes(cache, file); }),
                       "to be, a policy needs a `name`"));
  CHECK(test::dump(cache) == before);
}
