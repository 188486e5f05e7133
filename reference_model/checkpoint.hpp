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
  [[nodiscard]] std::vector<float> read(std::string_view name, std::span<const std::size_t> shape);

 private:
  void open_shards(const std::string& folder, const std::string& index);

  std::string folder_;
  std::vector<SafetensorsFile> files_;
  std::map<std::string, std::size_t, std::less<>> where_;  // tensor name -> index in files_
};

}  // namespace kvpolicy::reference
