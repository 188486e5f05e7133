// SPDX-License-Identifier: Apache-2.0
//
// The weights of a Hugging Face folder: one model.safetensors, or shards named by
// model.safetensors.index.json.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include <reference_model/safetensors.hpp>
#include <reference_model/weight_matrix.hpp>

namespace kvpolicy::reference {

class Checkpoint {
 public:
  /// @throws FormatError if neither file exists, a shard is missing or damaged, or the index names
  /// a tensor that its shard does not hold
  explicit Checkpoint(const std::string& folder);

  [[nodiscard]] bool contains(std::string_view name) const { return where_.contains(name); }
  [[nodiscard]] std::vector<std::string> names() const;

  /// Checks from the headers alone whether `read` would find the tensor.
  /// @throws FormatError, naming file and tensor, if it is missing or has another shape or type
  void check(std::string_view name, std::span<const std::size_t> shape) const;

  /// Reads a tensor of exactly this shape, converted to float.
  /// @throws FormatError as check, or if it holds a value that is not finite
  [[nodiscard]] std::vector<float> read(std::string_view name,
                                        std::span<const std::size_t> shape) const;

  /// A matrix as it is stored: its memory is the file's mapping, which lives as long as the matrix.
  /// @throws as read
  [[nodiscard]] WeightMatrix matrix(std::string_view name, std::size_t rows,
                                    std::size_t columns) const;

  /// How a tensor is stored. @throws FormatError if there is no such tensor of floating-point numbers
  [[nodiscard]] WeightFormat format(std::string_view name) const;

  /// Says that the tensor's memory will not be needed soon. Only a hint.
  void release(std::string_view name) const;

 private:
  /// The checked bytes of a tensor, all finite.
  [[nodiscard]] std::span<const std::byte> finite_bytes(std::string_view name,
                                                        std::span<const std::size_t> shape) const;
  [[nodiscard]] const SafetensorsFile& file_of(std::string_view name) const;
  void open_shards(const std::string& folder, const std::string& index);

  std::string folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> where_;  // tensor name -> index in files_
};

}  // namespace kvpolicy::reference
