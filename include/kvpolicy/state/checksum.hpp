// SPDX-License-Identifier: Apache-2.0
//
// A 64-bit checksum of bytes, faster than a disk. It detects accidents, not attacks.
//
// Method: XXH64 by Yann Collet, from its published specification. Seeds and results are the same on
// little-endian machines; words are read in the machine's own byte order.
#pragma once

#include <array>
#include <bit>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

namespace kvpolicy {

/// XXH64 of the bytes.
[[nodiscard]] inline std::uint64_t checksum(std::span<const std::byte> bytes, std::uint64_t seed = 0) {
  constexpr std::uint64_t prime1 = 0x9E3779B185EBCA87U;
  constexpr std::uint64_t prime2 = 0xC2B2AE3D27D4EB4FU;
  constexpr std::uint64_t prime3 = 0x165667B19E3779F9U;
  constexpr std::uint64_t prime4 = 0x85EBCA77C2B2AE63U;
  constexpr std::uint64_t prime5 = 0x27D4EB2F165667C5U;
  const auto round = [](std::uint64_t lane, std::uint64_t word) {
    return std::rotl(lane + word * prime2, 31) * prime1;
  };

  const std::byte* at = bytes.data();
  std::size_t left = bytes.size();
  const auto take = [&]<class Word>(Word word) {
    std::memcpy(&word, at, sizeof word);
    at += sizeof word;
    left -= sizeof word;
    return word;
  };

  std::uint64_t hash = seed + prime5;
  if (left >= 32) {
    std::array<std::uint64_t, 4> lanes{seed + prime1 + prime2, seed + prime2, seed, seed - prime1};
    while (left >= 32) {
      for (std::uint64_t& lane : lanes) lane = round(lane, take(std::uint64_t{}));
    }
    hash =
        std::rotl(lanes[0], 1) + std::rotl(lanes[1], 7) + std::rotl(lanes[2], 12) + std::rotl(lanes[3], 18);
    for (const std::uint64_t lane : lanes) hash = (hash ^ round(0, lane)) * prime1 + prime4;
  }
  hash += bytes.size();
  while (left >= 8) hash = std::rotl(hash ^ round(0, take(std::uint64_t{})), 27) * prime1 + prime4;
  if (left >= 4) hash = std::rotl(hash ^ take(std::uint32_t{}) * prime1, 23) * prime2 + prime3;
  while (left > 0) hash = std::rotl(hash ^ take(std::uint8_t{}) * prime5, 11) * prime1;
  hash = (hash ^ (hash >> 33)) * prime2;
  hash = (hash ^ (hash >> 29)) * prime3;
  return hash ^ (hash >> 32);
}

}  // namespace kvpolicy
