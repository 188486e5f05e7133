// SPDX-License-Identifier: Apache-2.0
//
// What the library keeps of keys: reads how many bits, how many numbers share a scale, whether these are channels of a
// row ("row") or rows of a channel ("channel"), and whether rows are rotated ("rotated" or "plain"); then rows of 64
// floats. Writes the rows that a quantised head then shows. check.py compares them with the reference.
#include <cstdio>
#include <cstdlib>
#include <string_view>
#include <vector>

#include <kvpolicy/core/row.hpp>
#include <kvpolicy/storage/residual_storage.hpp>

namespace {

constexpr std::size_t channels = 64;

template <kvpolicy::Granularity Keys>
int restore(const kvpolicy::ResidualConfig& config, const std::vector<float>& numbers) {
  const std::size_t rows = numbers.size() / channels;
  kvpolicy::ResidualStorage<float, Keys> storage{config, {.head_dim = channels, .page_rows = 64}};
  const kvpolicy::Plane exact{.format = {.encoding = kvpolicy::Encoding::float32},
                              .base = reinterpret_cast<const std::byte*>(numbers.data()),
                              .row_stride = channels * sizeof(float)};
  kvpolicy::Segment given;
  given.keys = given.values = exact;
  given.rows = rows;
  storage.append(given);
  kvpolicy::SegmentList shown;
  storage.show(0, rows, {}, shown);
  std::vector<float> row(channels);
  for (const kvpolicy::Segment& segment : shown) {
    if (!kvpolicy::is_quantized(segment.keys.format.encoding)) return 3;
    for (std::size_t i = 0; i < segment.rows; ++i) {
      kvpolicy::load_row(segment.keys, i, row);
      std::fwrite(row.data(), sizeof(float), channels, stdout);
    }
  }
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 5) return 2;
  kvpolicy::ResidualConfig config;
  config.bits = static_cast<std::size_t>(std::atoi(argv[1]));
  config.key_group = static_cast<std::size_t>(std::atoi(argv[2]));
  config.residual = 0;
  config.key_hadamard = std::string_view{argv[4]} == "rotated";
  std::vector<float> numbers(channels);
  std::size_t read = 0;
  while (std::fread(numbers.data() + read, sizeof(float), channels, stdin) == channels) {
    numbers.resize((read += channels) + channels);
  }
  numbers.resize(read);
  return std::string_view{argv[3]} == "channel" ? restore<kvpolicy::Granularity::per_channel>(config, numbers)
                                                : restore<kvpolicy::Granularity::per_token>(config, numbers);
}
