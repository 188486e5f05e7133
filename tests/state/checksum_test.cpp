// SPDX-License-Identifier: Apache-2.0
#include <doctest/doctest.h>

#include <algorithm>
#include <cstddef>
#include <sstream>
#include <string>
#include <string_view>
#include <vector>

#include <kvpolicy/core/error.hpp>
#include <kvpolicy/state/records.hpp>

#include "support/compare.hpp"
#include "support/tensors.hpp"

namespace {

std::uint64_t of(std::string_view text, std::uint64_t seed = 0) {
  return kvpolicy::checksum(std::as_bytes(std::span{text}), seed);
}

}  // namespace

TEST_CASE("checksums are XXH64's") {
  // Values from xxhsum 0.8 and from the specification.
  CHECK(of("") == 0xEF46DB3751D8E999U);
  CHECK(of("a") == 0xD24EC4F1A98C6E5BU);
  CHECK(of("abc") == 0x44BC2CF5AD770999U);
  CHECK(of("Nobody inspects the spammish repetition") == 0xFBCEA83C8A378BF1U);
}

TEST_CASE("records return the bytes, however the writes and the reads are cut") {
  test::Random random{1};
  for (const std::size_t size :
       {std::size_t{0}, std::size_t{1}, kvpolicy::block_bytes - 1, kvpolicy::block_bytes,
        kvpolicy::block_bytes + 1, 2 * kvpolicy::block_bytes, 3 * kvpolicy::block_bytes + 777}) {
    CAPTURE(size);
    std::vector<std::byte> bytes(size);
    for (std::byte& byte : bytes) byte = static_cast<std::byte>(random());
    std::stringstream stream;
    kvpolicy::StreamSink sink{stream};
    kvpolicy::RecordWriter writer{sink};
    for (std::size_t done = 0; done < size;) {
      const std::size_t count = std::min(size - done, test::below(random, 700000));
      writer.write(std::span{bytes}.subspan(done, count));
      done += count;
    }
    writer.finish();
    stream << "what follows";
    std::vector<std::byte> back(size);
    kvpolicy::RecordReader reader{stream, "file"};
    for (std::size_t done = 0; done < size;) {
      const std::size_t count = std::min(size - done, test::below(random, 700000));
      reader.read(std::span{back}.subspan(done, count));
      done += count;
    }
    reader.finish(false);
    CHECK(back == bytes);
    std::string rest;
    std::getline(stream, rest);
    CHECK(rest == "what follows");
    std::byte more{};
    CHECK(test::thrown<kvpolicy::FormatError>([&] { reader.read({&more, 1}); }) ==
          "file: ends where more must follow");
  }
}

TEST_CASE("a reader notices records that are swapped or left out") {
  std::ostringstream out;
  kvpolicy::StreamSink sink{out};
  kvpolicy::RecordWriter writer{sink};
  const std::vector<std::byte> record(kvpolicy::block_bytes);
  for (int i = 0; i < 3; ++i) writer.write(record);  // three equal records
  writer.finish();
  const std::string file = out.str();
  constexpr std::size_t whole = kvpolicy::block_bytes + sizeof(kvpolicy::RecordHeader);
  const auto reads = [&](const std::string& text) {
    std::istringstream in{text};
    return test::thrown<kvpolicy::FormatError>([&] {
      kvpolicy::RecordReader reader{in, "file"};
      std::vector<std::byte> back(3 * kvpolicy::block_bytes);
      reader.read(back);
      reader.finish(true);
    });
  };
  CHECK(reads(file).empty());
  const std::string swapped = file.substr(0, 16) + file.substr(16 + whole, whole) + file.substr(16, whole) +
                              file.substr(16 + 2 * whole);
  CHECK(test::contains(reads(swapped), "file: record 1 is damaged: its checksum is "));
  CHECK(test::contains(reads(file.substr(0, 16) + file.substr(16 + whole)), "record 1 is damaged"));
  CHECK(reads(file.substr(0, 16 + whole)) == "file: is cut off before record 2");
  CHECK(reads(file + "x") == "file: continues after its last record");
}
