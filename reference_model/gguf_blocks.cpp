// SPDX-License-Identifier: Apache-2.0
#include <reference_model/gguf_blocks.hpp>

#include <algorithm>
#include <array>
#include <cstring>

#include <kvpolicy/core/dtype.hpp>
#include <kvpolicy/core/error.hpp>

namespace kvpolicy::reference {
namespace {

constexpr std::array<GgufBlock, 8> blocks{{
    {GgufType::f32, "F32", 1, 4},
    {GgufType::f16, "F16", 1, 2},
    {GgufType::bf16, "BF16", 1, 2},
    {GgufType::q8_0, "Q8_0", 32, 34},
    {GgufType::q4_0, "Q4_0", 32, 18},
    {GgufType::q4_1, "Q4_1", 32, 20},
    {GgufType::q4_k, "Q4_K", 256, 144},
    {GgufType::q6_k, "Q6_K", 256, 210},
}};

// ggml's names by number, so that a refusal can say what the file holds. Numbers 4, 5, 31 to 33 and
// 36 to 38 were given up.
constexpr std::array<std::string_view, 40> names{
    "F32",    "F16",   "Q4_0",  "Q4_1",   "",      "",      "Q5_0",    "Q5_1",   "Q8_0",    "Q8_1",
    "Q2_K",   "Q3_K",  "Q4_K",  "Q5_K",   "Q6_K",  "Q8_K",  "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S",
    "IQ4_NL", "IQ3_S", "IQ2_S", "IQ4_XS", "I8",    "I16",   "I32",     "I64",    "F64",     "IQ1_M",
    "BF16",   "",      "",      "",       "TQ1_0", "TQ2_0", "",        "",       "",        "MXFP4"};

float half_at(const std::uint8_t* bytes) {
  float16 value;
  std::memcpy(&value.bits, bytes, sizeof(value.bits));
  return static_cast<float>(value);
}

float low(std::uint8_t byte) { return static_cast<float>(byte & 15); }
float high(std::uint8_t byte) { return static_cast<float>(byte >> 4); }

template <class Short>
void decode_short(const std::uint8_t* block, float* out) {
  Short value;
  std::memcpy(&value.bits, block, sizeof(value.bits));
  *out = static_cast<float>(value);
}

void decode_f32(const std::uint8_t* block, float* out) { std::memcpy(out, block, sizeof(float)); }

// Scale, then 32 signed numbers.
void decode_q8_0(const std::uint8_t* block, float* out) {
  const float scale = half_at(block);
  for (std::size_t i = 0; i < 32; ++i) {
    out[i] = scale * static_cast<float>(static_cast<std::int8_t>(block[2 + i]));
  }
}

// Scale, then 16 bytes whose low halves are the first 16 numbers.
void decode_q4_0(const std::uint8_t* block, float* out) {
  const float scale = half_at(block);
  for (std::size_t i = 0; i < 16; ++i) {
    out[i] = scale * (low(block[2 + i]) - 8.0F);
    out[i + 16] = scale * (high(block[2 + i]) - 8.0F);
  }
}

// Scale, minimum, then bytes as in Q4_0.
void decode_q4_1(const std::uint8_t* block, float* out) {
  const float scale = half_at(block);
  const float minimum = half_at(block + 2);
  for (std::size_t i = 0; i < 16; ++i) {
    out[i] = scale * low(block[4 + i]) + minimum;
    out[i + 16] = scale * high(block[4 + i]) + minimum;
  }
}

// Scale of scales, scale of minima, eight scales and minima of 6 bits in 12 bytes, then eight
// groups of 32 numbers: the low halves of 32 bytes are one group, the high halves the next.
void decode_q4_k(const std::uint8_t* block, float* out) {
  const float scale = half_at(block);
  const float scale_of_minima = half_at(block + 2);
  const std::uint8_t* packed = block + 4;
  for (std::size_t group = 0; group < 8; ++group) {
    // Groups 4 to 7 have their low four bits in the last four bytes and their high two bits above
    // the 6 bits of groups 0 to 3.
    const bool early = group < 4;
    const int own_scale =
        early ? packed[group] & 63 : (packed[group + 4] & 15) | (packed[group - 4] >> 6) << 4;
    const int own_minimum =
        early ? packed[group + 4] & 63 : packed[group + 4] >> 4 | (packed[group] >> 6) << 4;
    const float a = scale * static_cast<float>(own_scale);
    const float b = scale_of_minima * static_cast<float>(own_minimum);
    const std::uint8_t* numbers = block + 16 + group / 2 * 32;
    for (std::size_t i = 0; i < 32; ++i) {
      out[group * 32 + i] = a * (group % 2 == 0 ? low(numbers[i]) : high(numbers[i])) - b;
    }
  }
}

// 128 bytes with the low four bits of 256 numbers, 64 bytes with their high two bits, 16 signed
// scales, one for each 16 numbers, and the scale of these scales.
void decode_q6_k(const std::uint8_t* block, float* out) {
  const float scale = half_at(block + 208);
  for (std::size_t i = 0; i < 256; ++i) {
    const std::size_t part = i / 128;          // each half of the block has its own bytes
    const std::size_t quarter = i % 128 / 32;  // which bits of these bytes
    const std::size_t column = i % 32;
    const std::uint8_t four = block[part * 64 + quarter % 2 * 32 + column];
    const std::uint8_t two = block[128 + part * 32 + column];
    const int number = ((quarter < 2 ? four & 15 : four >> 4) | (two >> (2 * quarter) & 3) << 4) - 32;
    const auto own_scale = static_cast<std::int8_t>(block[192 + i / 16]);
    out[i] = scale * static_cast<float>(own_scale) * static_cast<float>(number);
  }
}

auto decoder_of(GgufType type) -> void (*)(const std::uint8_t*, float*) {
  switch (type) {
    case GgufType::f32: return decode_f32;
    case GgufType::f16: return decode_short<float16>;
    case GgufType::bf16: return decode_short<bfloat16>;
    case GgufType::q8_0: return decode_q8_0;
    case GgufType::q4_0: return decode_q4_0;
    case GgufType::q4_1: return decode_q4_1;
    case GgufType::q4_k: return decode_q4_k;
    case GgufType::q6_k: return decode_q6_k;
  }
  return nullptr;
}

}  // namespace

const GgufBlock* find_gguf_block(std::uint32_t number) noexcept {
  const auto found = std::ranges::find(blocks, static_cast<GgufType>(number), &GgufBlock::type);
  return found == blocks.end() ? nullptr : &*found;
}

const GgufBlock& block_of(GgufType type) noexcept {
  return *find_gguf_block(static_cast<std::uint32_t>(type));
}

std::string known_gguf_types() {
  std::string list;
  for (const GgufBlock& block : blocks) {
    if (!list.empty()) list += ", ";
    list += block.name;
  }
  return list;
}

std::string_view gguf_type_name(std::uint32_t number) noexcept {
  const bool named = number < names.size() && !names[number].empty();
  return named ? names[number] : "an unknown type";
}

void decode_gguf(GgufType type, std::span<const std::byte> bytes, std::span<float> out) {
  const GgufBlock& block = block_of(type);
  const std::size_t count = out.size() / block.elements;
  require<ShapeError>(count * block.elements == out.size() && count * block.bytes == bytes.size(),
                      "decode_gguf: ", bytes.size(), " bytes of ", block.name, " are not the blocks of ",
                      out.size(), " numbers");
  const auto* from = reinterpret_cast<const std::uint8_t*>(bytes.data());
  const auto decode = decoder_of(type);
  for (std::size_t i = 0; i < count; ++i) {
    decode(from + i * block.bytes, out.data() + i * block.elements);
  }
}

}  // namespace kvpolicy::reference
