// SPDX-License-Identifier: Apache-2.0
//
// The element types of tensors in GGUF files and how their blocks are decoded. The layouts are
// those of ggml (ggml-common.h); each block decodes to exactly the floats that ggml's own code
// gives.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace kvpolicy::reference {

/// The types that can be decoded, by ggml's numbers.
enum class GgufType : std::uint32_t {
  f32 = 0,
  f16 = 1,
  q4_0 = 2,
  q4_1 = 3,
  q8_0 = 8,
  q4_k = 12,
  q6_k = 14,
  bf16 = 30
};

/// A row of a tensor is a whole number of blocks.
struct GgufBlock {
  GgufType type;
  std::string_view name;
  std::size_t elements;  ///< numbers in a block
  std::size_t bytes;
};

/// The block of a type by its number in a file; null for a type that cannot be decoded.
[[nodiscard]] const GgufBlock* find_gguf_block(std::uint32_t number) noexcept;
[[nodiscard]] const GgufBlock& block_of(GgufType type) noexcept;

/// "F32, F16, ...": the types that can be decoded.
[[nodiscard]] std::string known_gguf_types();

/// ggml's name of a type, also of those that cannot be decoded, or "an unknown type".
[[nodiscard]] std::string_view gguf_type_name(std::uint32_t number) noexcept;

/// Decodes whole blocks. @throws ShapeError unless `blocks` are the bytes of out.size() numbers
void decode_gguf(GgufType type, std::span<const std::byte> blocks, std::span<float> out);

}  // namespace kvpolicy::reference
